"""Looks at a model once, before it is served: where its parts are, what its attention asks for, what must be refused.

Nothing here goes by architecture names. The model runs a few tokens with a recording attention function and a
recording mask function; what it passes to them is what it will pass later. A layer that does not call us, passes an
argument we do not understand or keeps state that cannot be cut back is a refusal that names the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from forerun.errors import OptionError, UnsupportedModel
from forerun.sampling.options import check_whole
from forerun.target.attention import additive, attend, forerun_attention, rule_of, visible
from forerun.target.dtypes import dtype_name
from forerun.target.head import head_of, partial_head_of
from forerun.target.pretrained import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PROBE_TOKENS = 5
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
IGNORED_ARGUMENTS = {"dropout", "position_ids", "cache_position", "use_cache", "is_causal"}
"""Arguments that change nothing for us: dropout is off, positions come with the rotated keys, and every attention of a
decoder layer is causal (the mask function's law is checked)."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one decoder layer, as it presented itself."""

    module: nn.Module
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True)
class Anatomy:
    """Where a model's parts are and what they look like."""

    decoder: nn.Module
    """Embedding to final norm."""
    layers: Sequence[nn.Module]
    norm: nn.Module
    attentions: Sequence[LayerAttention]
    embedding: nn.Module
    embedding_scale: float
    """What the model multiplies its embedding with before the first layer; 1 for most."""
    head: Callable[[Tensor], Tensor]
    """Logits [1, N, V] of normed hidden states [1, N, H], by the model's own code."""
    partial_head: Callable[[Tensor], Callable[[Tensor], Tensor]]
    """The same for some columns only: ids [D] -> function [1, N, H] -> [1, N, D]."""
    hidden_size: int
    vocab_size: int
    window: int
    notes: Sequence[str]
    """Decisions a user may want to know about."""

    def run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[1, T] -> [1, T, H], after the final norm."""
        return _run(self.decoder, token_ids, positions)


@quiet()
def examine(model: PreTrainedModel, max_model_len: int | None = None) -> Anatomy:
    """Takes a model apart and leaves it with `attn_implementation="forerun"`.

    Raises:
        UnsupportedModel: with the layer and the reason.
        OptionError: `max_model_len` exceeds what can be served.
    """
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder model; a decoder-only one is needed")
    decoder, layers = _decoder(model, config)
    _refuse_by_config(model, config, layers)
    window, notes = served_window(config, max_model_len)
    with _attention(model, "forerun_probe"), torch.inference_mode():
        norm, hidden, record, scale = _observe(model, decoder, layers)
    attentions = [_attention_of(i, layer, record, config, window) for i, layer in enumerate(layers)]
    _check_calls(record, attentions)
    head = head_of(model, decoder)
    with torch.inference_mode():
        logits = head(hidden)
    _check_against_stock(model, logits)
    AttentionInterface.register("forerun", forerun_attention)
    model.set_attn_implementation("forerun")
    return Anatomy(
        decoder=decoder,
        layers=layers,
        norm=norm,
        attentions=attentions,
        embedding=model.get_input_embeddings(),
        embedding_scale=scale,
        head=head,
        partial_head=partial(partial_head_of, model, decoder),
        hidden_size=hidden.shape[-1],
        vocab_size=logits.shape[-1],
        window=window,
        notes=notes,
    )


# -------------------------------------------------------------------------------------------------- from the config


def _refuse_by_config(model: PreTrainedModel, config: PretrainedConfig, layers: Sequence[nn.Module]) -> None:
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in KNOWN_LAYER_TYPES:
            raise UnsupportedModel(
                f"{type(model).__name__}: layer {i} ({type(layers[i]).__name__}) is of type {kind}, "
                "whose state cannot be cut back to an earlier token"
            )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(
            f"{type(model).__name__}: its layers ({type(layers[0]).__name__}) keep a recurrent state, "
            "which cannot be cut back to an earlier token"
        )


def served_window(config: PretrainedConfig, max_model_len: int | None) -> tuple[int, list[str]]:
    """Positions that can be served, and what to say about it."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    notes: list[str] = []
    for kind, rope in _ropes(config):
        if kind == "longrope":
            # Its factors follow the longest position of a call: in a packed pass one long request would change the
            # rotation of all others. Within the original length they are always the short ones.
            original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
            limit = min(limit or original, original)
            notes.append(f"longrope: the window is limited to {original} positions, where its factors are fixed")
        elif "dynamic" in kind:
            if limit is None:
                raise UnsupportedModel(f"{kind} RoPE without max_position_embeddings: its factors follow the length")
            notes.append(f"{kind} RoPE: the window is limited to {limit} positions, where its factors are fixed")
    if max_model_len is None:
        if limit is None:
            raise OptionError("--max-model-len", "the model's config names no maximum of positions; give one")
        return limit, notes
    check_whole("--max-model-len", max_model_len)
    if max_model_len < 1 or (limit is not None and max_model_len > limit):
        most = "" if limit is None else f" and at most {limit}"
        reason = f" ({notes[0]})" if notes else ""
        raise OptionError("--max-model-len", f"must be at least 1{most}{reason}, got {max_model_len}")
    return max_model_len, notes


def _ropes(config: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(type, parameters) of every RoPE of the model: one, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_type" in value]
    for rope in nested or [parameters]:
        if "rope_type" in rope:
            yield rope["rope_type"], rope


def _decoder(model: PreTrainedModel, config: PretrainedConfig) -> tuple[nn.Module, list[nn.Module]]:
    """The module from embedding to final norm, and its layers; of a multimodal model, those of the language model."""
    inner: nn.Module = cast(Any, model).get_decoder()
    for module in inner.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
                return module, list(child)
    raise UnsupportedModel(f"{type(model).__name__}: no list of {config.num_hidden_layers} decoder layers found")


# --------------------------------------------------------------------------------------------------- from one pass


Law = Callable[..., Tensor]
"""transformers' mask function: (batch, head, query position, key position) -> whether the query sees the key."""


@dataclass(slots=True)
class _Call:
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    window: int | None
    unknown: list[str]


@dataclass(slots=True)
class _Record:
    """What one probing pass left: attention calls in order, and the law of each mask that was made."""

    calls: list[_Call] = field(default_factory=list)
    laws: dict[int, tuple[Tensor, Law]] = field(default_factory=dict)


_RECORD: ContextVar[_Record] = ContextVar("forerun_probe_record")


def _recording_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    unknown = [k for k, v in others.items() if k not in IGNORED_ARGUMENTS and v is not None and v is not False]
    _RECORD.get().calls.append(_Call(module, query, key, value, attention_mask, sliding_window, unknown))
    rule = rule_of(query, scaling, None, softcap)  # what it sees is in the mask, or made here
    places = torch.arange(query.shape[2], device=query.device)
    allowed = visible(places, places, sliding_window) if attention_mask is None else attention_mask[0, 0]
    mask = additive(allowed.repeat(query.shape[1] // key.shape[1], 1), query.dtype)
    return attend(query, key, value, mask, rule), None


def _recording_mask(
    q_length: int, kv_length: int, mask_function: Law, device: torch.device | str = "cpu", **_: Any
) -> Tensor:
    mask = _allowed(mask_function, torch.arange(q_length, device=device), torch.arange(kv_length, device=device))
    _RECORD.get().laws[id(mask)] = (mask, mask_function)
    return mask


def _allowed(law: Law, queries: Tensor, keys: Tensor) -> Tensor:
    """[1, 1, N, L] of a mask function at positions queries [N] and keys [L]."""
    zero = torch.zeros(1, dtype=torch.long, device=queries.device)
    allowed = law(zero, zero, queries[:, None], keys[None, :])
    return torch.as_tensor(allowed, device=queries.device).expand(1, 1, len(queries), len(keys))


@contextmanager
def _attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model with another attention, set back afterwards."""
    AttentionInterface.register("forerun_probe", _recording_attention)
    AttentionMaskInterface.register("forerun_probe", _recording_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    if model.config.get_text_config()._attn_implementation != implementation:
        raise UnsupportedModel(f"{type(model).__name__} does not use transformers' attention interface")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _probe_ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(1, PROBE_TOKENS + 1, device=model.device)[None]  # [1, T]


def _run(decoder: nn.Module, token_ids: Tensor, positions: Tensor) -> Tensor:
    hidden: Tensor = decoder(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
    return hidden


def _observe(
    model: PreTrainedModel, decoder: nn.Module, layers: Sequence[nn.Module]
) -> tuple[nn.Module, Tensor, _Record, float]:
    """One pass over a few tokens: the final norm, the normed hidden states, the record and the embedding's scale."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def watch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        result = output[0] if isinstance(output, tuple) else output
        if isinstance(given, Tensor) and isinstance(result, Tensor):
            seen[module] = (given, result)

    watched = [*layers, *(m for m in decoder.children() if not isinstance(m, nn.ModuleList))]
    handles = [m.register_forward_hook(watch, with_kwargs=True) for m in watched]
    record = _Record()
    token = _RECORD.set(record)
    try:
        ids = _probe_ids(model)
        hidden = _run(decoder, ids, ids - 1)
    except (TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{type(model).__name__} does not run on packed rows: {error}") from error
    finally:
        _RECORD.reset(token)
        for handle in handles:
            handle.remove()
    scale = _scale_of(seen[layers[0]][0], model.get_input_embeddings()(ids)) if layers[0] in seen else 1.0
    return _final_norm(model, layers, seen, hidden), hidden, record, scale


def _scale_of(entering: Tensor, embedded: Tensor) -> float:
    """The factor between embedding and first layer; 1 where more than a factor lies between them."""
    wide, plain = entering.double(), embedded.double()
    factor = ((wide * plain).sum() / plain.square().sum()).item()
    exact = torch.allclose(wide, plain * factor, rtol=1e-2, atol=1e-3 * wide.abs().max().item())
    return 1.0 if not exact or abs(factor - 1) < 1e-6 else factor


def _final_norm(
    model: PreTrainedModel, layers: Sequence[nn.Module], seen: dict[nn.Module, tuple[Tensor, Tensor]], hidden: Tensor
) -> nn.Module:
    """The module between the last layer's output and the decoder's; also checks that every layer can be tapped."""
    for i, layer in enumerate(layers):
        if layer not in seen or seen[layer][0].shape != hidden.shape:
            raise UnsupportedModel(
                f"{type(model).__name__}: layer {i} ({type(layer).__name__}) does not carry one hidden state [T, H]"
            )
    for module, (given, result) in seen.items():
        if module not in layers and _same(given, seen[layers[-1]][1]) and _same(result, hidden):
            return module
    raise UnsupportedModel(f"{type(model).__name__}: no final norm found between the last layer and the head")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.data_ptr() == b.data_ptr()


def _attention_of(
    number: int, layer: nn.Module, record: _Record, config: PretrainedConfig, served: int
) -> LayerAttention:
    inside = set(layer.modules())
    calls = [call for call in record.calls if call.module in inside]
    where = f"layer {number} ({type(layer).__name__})"
    if len(calls) != 1:
        raise UnsupportedModel(
            f"{where} called the attention interface {len(calls)} times, once was expected; "
            "recurrent and other layers of their own kind cannot be cut back to an earlier token"
        )
    call = calls[0]
    if call.unknown:
        raise UnsupportedModel(
            f"{where} passes {', '.join(call.unknown)} to its attention, which is not understood here"
        )
    heads, rows, key_dim = call.key.shape[1:]
    if rows != PROBE_TOKENS or call.query.shape[2] != PROBE_TOKENS:
        raise UnsupportedModel(f"{where} attends over {rows} rows where {PROBE_TOKENS} were given")
    window = _window_of(call, where, record, config, served)
    return LayerAttention(call.module, heads, key_dim, call.value.shape[-1], window)


def _window_of(call: _Call, where: str, record: _Record, config: PretrainedConfig, served: int) -> int | None:
    """The sliding window that the layer's mask has. Some models do not pass it on to their attention: in transformers
    the mask is what counts, the argument is for kernels without masks."""
    if id(call.mask) not in record.laws:
        if call.mask is not None:
            raise UnsupportedModel(f"{where} changes its attention mask, which is not understood here")
        return call.window
    law = record.laws[id(call.mask)][1]
    for window in (call.window, None, getattr(config, "sliding_window", None)):
        if _law_is(law, window, served):
            return window
    raise UnsupportedModel(f"{where} has a mask that is neither causal nor a sliding window (chunked or bidirectional)")


def _law_is(law: Law, window: int | None, served: int) -> bool:
    """Whether a mask function lets through what `visible` does, tried at places where other laws differ."""
    edge = window or PROBE_TOKENS
    queries = sorted({q for q in (0, 1, edge - 1, edge, edge + 1, 3 * edge + 2, served - 1) if 0 <= q < served})
    for q in queries:
        keys = torch.tensor(
            sorted({k for k in (0, 1, q - edge - 1, q - edge, q - edge + 1, q - 1, q, q + 1) if k >= 0})
        )
        if not torch.equal(_allowed(law, torch.tensor([q]), keys)[0, 0], visible(torch.tensor([q]), keys, window)):
            return False
    return True


def _check_calls(record: _Record, attentions: Sequence[LayerAttention]) -> None:
    extra = [call for call in record.calls if call.module not in {a.module for a in attentions}]
    if extra:
        raise UnsupportedModel(f"{type(extra[0].module).__name__} attends outside the decoder layers")


def _check_against_stock(model: PreTrainedModel, logits: Tensor) -> None:
    """The recorded pass and our head against the model as it came, with its own eager attention.

    Whatever the recording cannot see - a sink kept in the module, a step between norm and head - shows here. The
    median over rows is compared: in half precision a near-tie of a mixture's router may change single rows. Ids that
    are no tokens may have -inf in both: that is a law, in which they have no mass.
    """
    with _attention(model, "eager"), torch.inference_mode():
        stock = model(input_ids=_probe_ids(model), use_cache=False).logits.double()
    name, ours = type(model).__name__, logits.double()
    never = stock == -torch.inf
    broken = int((~(stock.isfinite() | never)).sum())
    if broken or bool(never.all(-1).any()):
        what = f"{broken} of its logits are NaN or +inf" if broken else "it gives no token any probability"
        raise UnsupportedModel(
            f"{name}: {what} in its own forward; the checkpoint is damaged, "
            f"or --dtype {dtype_name(model.dtype)} is too narrow"
        )
    if bool((ours.isnan() | (ours == torch.inf)).any()):
        raise UnsupportedModel(f"{name}: its own forward is finite, but with our attention it gives NaN or +inf")
    others = (ours == -torch.inf) != never
    if bool(others.any()):
        ids = others.any(1)[0].nonzero()[:, 0].tolist()
        raise UnsupportedModel(
            f"{name}: its own forward and our reading of its head disagree which ids have a logit of -inf ({len(ids)} "
            f"ids, the first is {ids[0]}); it does something behind its head that is not understood here"
        )
    kept, scored = ours.masked_fill(never, 0), stock.masked_fill(never, 0)
    difference = (kept - scored).norm(dim=-1) / scored.norm(dim=-1)
    bound = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if not difference.median().item() < bound:
        raise UnsupportedModel(
            f"{name}: its logits differ from those of its own forward by {difference.median():.1%}; "
            "it does something in its attention or before its head that is not understood here"
        )
