"""A model that learns to draft: loaded or cut from a target, trained on packed sequences, saved as any other model.

It is trained through the attention that it will decode with - the same scores, windows and soft-caps - but without
storage, so that gradients pass. What it learns is thus what it does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from forerun.errors import UnsupportedModel
from forerun.target.attention import Rule, additive, attend, causal_without_mask, folds, rule_of, visible
from forerun.target.checkpoint import check_fits
from forerun.target.hf import HFTarget
from forerun.target.load import resolve
from forerun.target.packed import PackedLinear, pack_linears
from forerun.target.pretrained import pretrained, quiet
from forerun.target.probe import Anatomy, examine
from forerun.target.tokenizer import HFTokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TRAINING = 4.4
"""Times the float32 weights that training takes: weights, gradients and two moments, and a tenth for the rest."""
ONE_FILE = "1TB"
"""Largest shard of a saved model: a folder that is written again and again has its weights under one name."""


# ----------------------------------------------------------------------------------------------------------- attention


@dataclass
class _Packed:
    """What the attention calls of one training pass share."""

    lengths: Sequence[int]
    windows: Mapping[nn.Module, int | None]
    masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, query: Tensor, kv_heads: int, rule: Rule) -> Tensor | None:
        """What `attend` wants for one whole sequence of query [1, heads, S, dim]."""
        rows = query.shape[2]
        if causal_without_mask(rows, rule):
            return None
        key = rows, rule.window, query.shape[1] // kv_heads if folds(rows, rule) else 1
        if key not in self.masks:
            places = torch.arange(rows, device=query.device)
            self.masks[key] = additive(visible(places, places, rule.window).repeat(key[2], 1), query.dtype)
        return self.masks[key]


_PACKED: ContextVar[_Packed] = ContextVar("forerun_student_pass")


def _student_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, key_dim]
    key: Tensor,  # [1, kv_heads, T, key_dim]
    value: Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention interface with gradients: each packed sequence by itself, from its first row on."""
    packed = _PACKED.get()
    assert attention_mask is None, "masks are made here, from the lengths"
    rule = rule_of(query, scaling, packed.windows[module], softcap)
    sequences = zip(*(torch.split(x, list(packed.lengths), 2) for x in (query, key, value)), strict=True)
    out = [attend(q, k, v, packed.mask(q, k.shape[1], rule), rule) for q, k, v in sequences]
    return torch.cat(out, 1), None


# --------------------------------------------------------------------------------------------------------------- model


class StudentModel(nn.Module):
    """A causal LM in training. It never leaves evaluation mode: the teacher's whole law leaves dropout nothing to do.

    Args:
        model: in float32. It belongs to the student from here on.

    Raises:
        UnsupportedModel: it could not be decoded exactly here; the message names the layer.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.train()
        self.anatomy: Anatomy = examine(model)
        self._windows = {attention.module: attention.window for attention in self.anatomy.attentions}
        AttentionInterface.register("forerun_student", _student_attention)
        model.set_attn_implementation("forerun_student")

    def train(self, mode: bool = True) -> Self:
        """Notes the mode and hands it on to nothing."""
        self.model.train(False)
        self.training = mode
        return self

    @property
    def vocab_size(self) -> int:
        """Columns of its logits."""
        return self.anatomy.vocab_size

    @property
    def window(self) -> int:
        return self.anatomy.window

    @property
    def tables(self) -> tuple[nn.Embedding, nn.Linear]:
        """Embedding and head; they may share their weight."""
        model = cast(Any, self.model)
        return model.get_input_embeddings(), model.get_output_embeddings()

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states after the final norm, [T] -> [T, H].

        Args:
            tokens: [T] packed sequences.
            positions: [T] of each row in its sequence.
            lengths: of the sequences; they sum to T.
        """
        token = _PACKED.set(_Packed(lengths, self._windows))
        try:
            return self.anatomy.run(tokens[None], positions[None])[0]
        finally:
            _PACKED.reset(token)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head, soft-cap included: [n, H] -> [n, V]."""
        return self.anatomy.head(hidden[None])[0]

    def as_target(self, tokenizer: HFTokenizer, saved: torch.dtype, dtype: torch.dtype) -> HFTarget:
        """A frozen copy as it is loaded in `dtype` after it was saved in `saved`."""
        target = HFTarget(_rounded(self.model, saved, dtype), tokenizer)
        target.linear_reason = pack_linears(target.model)
        return target

    def save(self, folder: Path, tokenizer: HFTokenizer, dtype: torch.dtype) -> None:
        """Writes model, generation config and tokenizer as transformers does, the weights in one file."""
        with quiet():
            _rounded(self.model, dtype).save_pretrained(folder, max_shard_size=ONE_FILE)
            tokenizer.inner.save_pretrained(folder)


@torch.no_grad()
def _rounded(model: PreTrainedModel, *dtypes: torch.dtype) -> PreTrainedModel:
    """A copy whose stored tensors are rounded to each dtype in turn. What is made from the config (rotary frequencies)
    keeps its own, as `from_pretrained` leaves it."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        own = dict(module.named_parameters(recurse=False))
        stored = {n: b for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set}
        for tensor in (*own.values(), *stored.values()):
            for dtype in dtypes if tensor.is_floating_point() else ():
                tensor.data = tensor.data.to(dtype)
    return twin


# --------------------------------------------------------------------------------------------------- where it is from


def load_student(
    source: str, device: torch.device, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[StudentModel, HFTokenizer]:
    """What `load_target` would load, to be trained: in float32, on the CPU.

    Args:
        source: id, folder, `.gguf` file or embedded name.
        device: where it will be trained, and needs the memory.
        revision: branch, tag or commit of a Hugging Face id.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ModelError: see `load_target`.
    """
    checkpoint, _ = resolve(source, "auto", device, revision, trust_remote_code)
    check_fits(checkpoint, torch.float32, device, TRAINING, "to train")
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    model, tokenizer = pretrained(source, checkpoint.folder, torch.float32, options, use_safetensors=True)
    return StudentModel(model), HFTokenizer(tokenizer)


def cut_student(target: HFTarget, layers: Sequence[int]) -> StudentModel:
    """A copy in float32, on the CPU, of a target with some of its decoder layers alone.

    Args:
        target: stays as it is.
        layers: which, ascending in 0 .. n - 1.

    Raises:
        UnsupportedModel: its family cannot be made of fewer layers by its config.
    """
    model = target.model
    config = copy.deepcopy(model.config)
    _keep_layers(config.get_text_config(), layers)
    config._attn_implementation = "eager"
    with quiet(), torch.random.fork_rng(devices=[]):  # the weights it draws for a start are not used
        student = type(model)(config)
    student.generation_config = copy.deepcopy(model.generation_config)
    try:
        student.load_state_dict(_kept_state(target, layers))
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__}: a model of its layers {', '.join(map(str, layers))} has other weights than these "
            f"layers ({' '.join(str(error).split())[:200]}); name a model to begin with"
        ) from error
    return StudentModel(student)


def _keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Writes into a config that these are its layers. Fields such as `layer_types` have an item for each layer, others
    such as `mlp_only_layers` name layers by their numbers."""
    count = config.num_hidden_layers
    config.num_hidden_layers = len(layers)
    for name, value in config.to_dict().items():
        if name == "first_k_dense_replace":
            setattr(config, name, sum(layer < value for layer in layers))
        if "layer" not in name or not isinstance(value, list):
            continue
        if name in ("mlp_only_layers", "moe_layers"):
            setattr(config, name, [place for place, layer in enumerate(layers) if layer in value])
        elif len(value) == count:
            setattr(config, name, [value[layer] for layer in layers])


def _kept_state(target: HFTarget, layers: Sequence[int]) -> dict[str, Tensor]:
    """The state of a target's model with only these layers, numbered from 0; packed weights in their plain layout."""
    model = target.model
    packed = {
        f"{name}.weight": module.weight for name, module in model.named_modules() if isinstance(module, PackedLinear)
    }
    first = next(name for name, module in model.named_modules() if module is target.anatomy.layers[0])
    prefix = first.removesuffix("0")
    numbers = {str(layer): str(place) for place, layer in enumerate(layers)}
    out = {}
    for name, tensor in (model.state_dict() | packed).items():
        if not name.startswith(prefix):
            out[name] = tensor
            continue
        number, _, rest = name.removeprefix(prefix).partition(".")
        if number in numbers:
            out[f"{prefix}{numbers[number]}.{rest}"] = tensor
    return out
