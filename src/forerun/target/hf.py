"""Any Hugging Face causal LM as a target, through transformers' attention interface and our own KV storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from forerun.errors import ModelError, OptionError
from forerun.sampling import Sampling
from forerun.target.attention import CURRENT, LayerStore, LoopPlan, PaddedPlan, Pass
from forerun.target.base import BLOCK_SIZE, Batch, Forward, Shape, Target, Tokenizer
from forerun.target.probe import Anatomy, examine
from forerun.target.rope import full_attention_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Attention = Literal["auto", "loop", "padded"]


class HFTarget(Target):
    """A transformers model over packed rows. The model belongs to the target from here on: its attention is ours.

    Args:
        model: a causal LM on its device, in its dtype.
        tokenizer: its tokenizer.
        max_model_len: serve a shorter window than the model has.
        attention: `loop` or `padded`; `auto` chooses by the device, `attention_reason` says why.

    Raises:
        UnsupportedModel: it could not be decoded exactly here; the message names the layer.
        OptionError: `max_model_len` is more than the model has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        name: str | None = None,
        max_model_len: int | None = None,
        attention: Attention = "auto",
    ):
        model.train(False).requires_grad_(False)
        if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            # The grouped product that experts use by default has no float64.
            cast(Any, model).set_experts_implementation("eager")
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path or type(model).__name__
        self.anatomy: Anatomy = examine(model, max_model_len)
        self.window = self.anatomy.window
        self.vocab_size = self.anatomy.vocab_size
        self.hidden_size = self.anatomy.hidden_size
        self.num_layers = len(self.anatomy.layers)
        self.dtype, self.device = model.dtype, model.device
        self.shape = _shape(model, self.anatomy)
        self.eos_token_ids = eos_ids(model.config, getattr(model, "generation_config", None))
        self.sampling_defaults: Mapping[str, float] = _sampling_defaults(model)
        self._plan, self.attention_reason = _choose_plan(attention, self.device)
        self.linear_reason = "plain linear layers: the model was given as it is"
        self._stores: dict[nn.Module, LayerStore] = {}

    @property
    def block_bytes(self) -> int:
        row = sum(a.kv_heads * (a.key_dim + a.value_dim) for a in self.anatomy.attentions)
        return row * BLOCK_SIZE * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        self._stores.clear()
        rows = num_blocks * BLOCK_SIZE

        def storage(heads: int, dim: int) -> Tensor:
            # Zeros, not garbage: a NaN in a row nobody wrote would survive a mask (0 * NaN).
            return torch.zeros(rows, heads, dim, dtype=self.dtype, device=self.device)

        for a in self.anatomy.attentions:
            keys, values = storage(a.kv_heads, a.key_dim), storage(a.kv_heads, a.value_dim)
            self._stores[a.module] = LayerStore(keys, values, a.window)

    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Forward:
        """See `Target.forward`. The results are ordinary tensors without a graph: training may use them as they are."""
        assert max(batch.positions) < self.window, "a row lies beyond the window"
        slots = torch.tensor(batch.slots, device=self.device)
        token = CURRENT.set(Pass(self._stores, slots, self._plan(batch, self.device)))
        try:
            with torch.inference_mode(), _tapped(self.anatomy, taps) as seen:
                hidden = self.anatomy.run(
                    torch.tensor([batch.token_ids], device=self.device),
                    torch.tensor([batch.positions], device=self.device),
                )  # [1, T, H], after the final norm
        finally:
            CURRENT.reset(token)
        with torch.no_grad():
            index = torch.tensor(batch.logit_index, dtype=torch.long, device=self.device)
            features = torch.cat([seen[h] for h in taps], -1) if taps else None
            return Forward(self.logits(hidden[0].index_select(0, index)), features)

    def final_norm(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.anatomy.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(1, -1, self.hidden_size)
        if rows.shape[1] == 0:
            return hidden.new_empty(*hidden.shape[:-1], self.vocab_size)
        return self.anatomy.head(rows).reshape(*hidden.shape[:-1], self.vocab_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.anatomy.embedding(token_ids)
        scale = self.anatomy.embedding_scale
        return embedded if scale == 1 else embedded * torch.tensor(scale, dtype=embedded.dtype)

    def partial_logits(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        head = self.anatomy.partial_head(ids)

        def logits(hidden: Tensor) -> Tensor:
            rows = hidden.reshape(1, -1, self.hidden_size)
            return head(rows).reshape(*hidden.shape[:-1], len(ids))

        return logits


@contextmanager
def _tapped(anatomy: Anatomy, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What hidden states h are during a pass: the input of decoder layer h, and of the final norm for h = n."""
    assert list(taps) == sorted(set(taps)), f"taps must ascend: {taps}"
    seen: dict[int, Tensor] = {}
    readers = [*anatomy.layers, anatomy.norm]

    def watch(h: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            # A copy: some models add to the residual stream in place.
            seen[h] = (args[0] if args else kwargs["hidden_states"])[0].clone()  # [T, H]

        return keep

    handles = [readers[h].register_forward_pre_hook(watch(h), with_kwargs=True) for h in taps]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _choose_plan(attention: Attention, device: torch.device) -> tuple[type[LoopPlan] | type[PaddedPlan], str]:
    if attention == "auto":
        if device.type == "cpu":
            return LoopPlan, "loop: on a CPU one call per request costs little and nothing is padded"
        return PaddedPlan, f"padded: on {device.type} launches cost more than padding (not yet run on a GPU)"
    return (LoopPlan if attention == "loop" else PaddedPlan), f"{attention}: asked for"


def _first(config: PretrainedConfig, names: Sequence[str]) -> Any:
    """The first of these fields that a config has and sets."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _shape(model: PreTrainedModel, anatomy: Anatomy) -> Shape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return Shape(
        hidden_size=anatomy.hidden_size,
        intermediate_size=_first(config, ("intermediate_size", "ffn_dim", "n_inner")) or 4 * anatomy.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or anatomy.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=full_attention_rope(config),
    )


def eos_ids(config: PretrainedConfig, generation_config: Any) -> frozenset[int]:
    """Every end-of-sequence id that a model's config and generation config (None: it has none) name."""
    found: set[int] = set()
    for one in (config, config.get_text_config(), generation_config):
        ids = getattr(one, "eos_token_id", None)
        found |= set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)


SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _sampling_defaults(model: PreTrainedModel) -> dict[str, float]:
    """What the generation config sets, as vLLM reads it: `do_sample` has no part in it, temperature 0 is greedy.

    Raises:
        ModelError: a value that cannot be sampled with.
    """
    config = getattr(model, "generation_config", None)
    fields = {name: getattr(config, name, None) for name in SAMPLING_FIELDS}
    found = {name: value for name, value in fields.items() if value is not None}
    try:
        Sampling(**found)
    except OptionError as error:
        raise ModelError(f"--target: the generation config of {model.config.name_or_path}: {error}") from error
    return found
