"""Our attention function for transformers' attention interface, over paged KV storage.

A model built with `attn_implementation="forerun"` calls `forerun_attention` once per layer and pass. What that call
needs beyond the model's own arguments - where rows are written, which rows each request reads - is the running `Pass`,
built once per pass and found through a context variable: nothing in between has to hand it down, and two models may
run in two threads.

Two ways to the same numbers, tested against each other: `LoopPlan` makes one call per request, without padding;
`PaddedPlan` gathers the short segments of all requests into one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from forerun.target.base import BLOCK_SIZE, Batch, Segment
from forerun.target.blocks import blocks_for


class LayerStore(NamedTuple):
    """One layer's KV rows, indexed by slot."""

    keys: Tensor  # [num_blocks * BLOCK_SIZE, kv_heads, key_dim]
    values: Tensor  # [num_blocks * BLOCK_SIZE, kv_heads, value_dim]
    window: int | None
    """Row q sees row k if 0 <= q - k < window."""


class Rule(NamedTuple):
    """How a layer scores."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    """False: every row of a segment sees the whole segment and all before it (a drafter's block)."""


def rule_of(query: Tensor, scaling: float | None, window: int | None, softcap: float | None) -> Rule:
    """The rule of an attention call, from what a model passes to it; the window is the one its mask was found to have.

    Args:
        query: [.., key_dim].
        scaling: None stands for 1 / sqrt(key_dim).
        window: of the layer.
        softcap: of the scores, if there is one.
    """
    return Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)


class Plan(Protocol):
    """Which rows each request of a pass reads; holds the index tensors and masks that all layers share."""

    def attend(self, query: Tensor, store: LayerStore, rule: Rule) -> Tensor:
        """Attention of query [1, heads, T, key_dim] over the stored rows: [1, T, heads, value_dim]."""


@dataclass(slots=True)
class Pass:
    """What the attention calls of one forward pass share."""

    stores: Mapping[nn.Module, LayerStore]
    slots: Tensor  # [T]
    plan: Plan


FOLD_ROWS = 32
"""Segments up to this many rows - decoding and verification - have the query heads of a KV head folded into rows."""

EXACT_ROWS = 16
"""bfloat16 segments up to this many rows are attended to row by row. With packed linear layers, whose rows do not
depend on each other, verification then has plain decoding's very numbers; at 4 rows of a 1.5B model it costs 2.5 % of a
pass (measured). float32 gains nothing by it: there the linear layers themselves differ between one row and several."""

CURRENT: ContextVar[Pass | None] = ContextVar("forerun_pass", default=None)


def forerun_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, key_dim]
    key: Tensor,  # [1, kv_heads, T, key_dim]
    value: Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention interface: writes the rows' keys and values, then attends. Its other arguments were looked at when
    the model was loaded (`probe`), where an argument we do not understand is a refusal."""
    current = CURRENT.get()
    assert current is not None, "the model belongs to a forerun target now; call it through target.forward"
    assert attention_mask is None, "masks are made here, from the block tables"
    store = current.stores[module]
    store.keys.index_copy_(0, current.slots, key[0].transpose(0, 1))
    store.values.index_copy_(0, current.slots, value[0].transpose(0, 1))
    rule = rule_of(query, scaling, store.window, softcap)
    return current.plan.attend(query, store, rule), None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Scores, softmax, sum over what the mask lets through.

    Args:
        query: [B, heads, N, key_dim].
        key: [B, kv_heads, L, key_dim], value: [B, kv_heads, L, value_dim].
        mask: added to the scores, [.., N, L]; [.., groups * N, L] where `folds` says so; None: a single row sees all it
            is given, several rows (then N = L) are causal, or all see everything if the rule is not causal.

    Returns:
        [B, N, heads, value_dim]
    """
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    if folds(rows, rule):
        query = query.reshape(batch, key.shape[1], groups * rows, -1)
    if rule.softcap is not None:
        out = _attend_with_softcap(query, key, value, mask, rule.scaling, rule.softcap)
    else:
        shared = query.shape[1] != key.shape[1]
        causal = mask is None and rows > 1 and rule.causal
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=rule.scaling, enable_gqa=shared
        )
    return out.reshape(batch, heads, rows, -1).transpose(1, 2)


def folds(rows: int, rule: Rule) -> bool:
    """Whether heads that share a KV head are laid side by side as rows, instead of repeating keys and values.

    On a CPU torch's own grouped attention took 2 to 14 times as long for one bfloat16 row (measured, torch 2.13); for
    long prefill chunks it is the faster one, and the mask stays small.
    """
    return rows <= FOLD_ROWS or rule.softcap is not None


def causal_without_mask(rows: int, rule: Rule) -> bool:
    """Whether so many rows from the first one on need no mask: torch's own causal attention is what the rule says."""
    return rows == 1 or (not folds(rows, rule) and (rule.window is None or rows <= rule.window))


def _attend_with_softcap(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    # Half precision is summed in float32, as the models that use a soft-cap do themselves; float64 stays float64.
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return torch.matmul(torch.softmax(scores, -1, dtype=wide).to(value.dtype), value)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Mask [.., N, L]: whether the row at position queries [.., N] sees the one at keys [L]."""
    distance = queries[..., None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, -inf elsewhere; made once per pass, as torch would make it from a bool mask in every layer."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def slots_of(tables: Tensor) -> Tensor:
    """Block tables [.., N] -> the slots of their rows [.., N * BLOCK_SIZE], position by position."""
    offsets = torch.arange(BLOCK_SIZE, device=tables.device)
    return (tables[..., None] * BLOCK_SIZE + offsets).flatten(-2)


# ------------------------------------------------------------------------------------------------ one call a request


class Span:
    """One segment of a pass: packed rows first .. last - 1, at positions start .. end - 1."""

    def __init__(self, segment: Segment, first: int, device: torch.device):
        self.first, self.last = first, first + len(segment.tokens)
        self.start, self.end = segment.start, segment.end
        used = list(segment.blocks[: blocks_for(segment.end)])
        self._base = used[0] * BLOCK_SIZE
        neighbours = used == list(range(used[0], used[0] + len(used)))
        self._slots = None if neighbours else slots_of(torch.tensor(used, device=device))[: segment.end]
        self._device = device
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, query: Tensor, store: LayerStore, rule: Rule) -> Tensor:
        low = 0 if rule.window is None else max(0, self.start - rule.window + 1)
        rows = query[:, :, self.first : self.last]
        keys, values = self._read(store.keys, low), self._read(store.values, low)
        if rule.causal and query.dtype == torch.bfloat16 and 1 < self.last - self.first <= EXACT_ROWS:
            return self._row_by_row(rows, keys, values, low, rule)
        return attend(rows, keys, values, self._mask(low, query, store, rule), rule)

    def _row_by_row(self, query: Tensor, keys: Tensor, values: Tensor, low: int, rule: Rule) -> Tensor:
        """Each row as the call plain decoding would make for it, so that it has the same bits."""
        outputs = []
        for row in range(query.shape[2]):
            end = self.start + row + 1
            first = low if rule.window is None else max(low, end - rule.window)
            seen = slice(first - low, end - low)
            outputs.append(attend(query[:, :, row : row + 1], keys[:, :, seen], values[:, :, seen], None, rule))
        return torch.cat(outputs, 1)

    def _read(self, storage: Tensor, low: int) -> Tensor:
        """Positions low .. end - 1 as [1, kv_heads, L, dim]: a view where the table's blocks are neighbours."""
        if self._slots is None:
            return storage[self._base + low : self._base + self.end].transpose(0, 1)[None]
        return storage[self._slots[low:]].transpose(0, 1)[None]

    def _mask(self, low: int, query: Tensor, store: LayerStore, rule: Rule) -> Tensor | None:
        """[N, L], repeated for the heads that are folded into rows."""
        rows = self.last - self.first
        folded = folds(rows, rule)
        if not rule.causal:
            assert rule.window is None, "a block that sees itself whole has no sliding window"
            return None
        if rows == 1 or (self.start == 0 and causal_without_mask(rows, rule)):
            return None
        repeats = query.shape[1] // store.keys.shape[1] if folded else 1
        if (rule.window, repeats) not in self._masks:
            queries = torch.arange(self.start, self.end, device=self._device)
            keys = torch.arange(low, self.end, device=self._device)
            allowed = visible(queries, keys, rule.window).repeat(repeats, 1)
            self._masks[rule.window, repeats] = additive(allowed, query.dtype)
        return self._masks[rule.window, repeats]


class LoopPlan:
    """One call per request: no padding, no copy where a table's blocks are neighbours. The default on a CPU."""

    def __init__(self, batch: Batch, device: torch.device):
        self.spans: list[Span] = []
        first = 0
        for segment in batch.segments:
            self.spans.append(Span(segment, first, device))
            first += len(segment.tokens)

    def attend(self, query: Tensor, store: LayerStore, rule: Rule) -> Tensor:
        outputs = [span.attend(query, store, rule) for span in self.spans]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


# ----------------------------------------------------------------------------------------- one call for all short ones


class PaddedPlan:
    """Short segments in one gathered call [R, longest], long ones in a call each: few launches, for accelerators.

    Not yet run on a GPU: it is tested on a CPU only, where it gives what `LoopPlan` gives.
    """

    def __init__(self, batch: Batch, device: torch.device):
        self.long: list[Span] = []
        short: list[tuple[Segment, int]] = []
        first = 0
        for segment in batch.segments:
            if len(segment.tokens) > FOLD_ROWS:
                self.long.append(Span(segment, first, device))
            else:
                short.append((segment, first))
            first += len(segment.tokens)
        self.short = _Gathered(short, device) if short else None

    def attend(self, query: Tensor, store: LayerStore, rule: Rule) -> Tensor:
        heads, rows = query.shape[1:3]
        out = query.new_empty(1, rows, heads, store.values.shape[-1])
        for span in self.long:
            out[:, span.first : span.last] = span.attend(query, store, rule)
        if self.short is not None:
            out[0, self.short.packed] = self.short.attend(query, store, rule)
        return out


class _Gathered:
    """Index tensors of R padded segments, N rows each over L positions."""

    def __init__(self, segments: list[tuple[Segment, int]], device: torch.device):
        most = max(len(segment.tokens) for segment, _ in segments)
        longest = max(segment.end for segment, _ in segments)
        rows, places, queries, tables = [], [], [], []
        for r, (segment, first) in enumerate(segments):
            count = len(segment.tokens)
            # Padding repeats the last row: its result is dropped, and no softmax runs over nothing.
            index = [min(i, count - 1) for i in range(most)]
            rows.append([first + i for i in index])
            queries.append([segment.start + i for i in index])
            places += [r * most + i for i in range(count)]
            own = list(segment.blocks[: blocks_for(segment.end)])
            tables.append(own + own[:1] * (blocks_for(longest) - len(own)))
        self._rows = torch.tensor(rows, device=device)  # [R, N] packed row numbers
        self._places = torch.tensor(places, device=device)  # where each real row lies in [R * N]
        self._queries = torch.tensor(queries, device=device)  # [R, N] positions
        slots = slots_of(torch.tensor(tables, device=device))[:, :longest]
        ends = torch.tensor([[segment.end] for segment, _ in segments], device=device)
        # Beyond a request's end its first row is read: what lies in rows nobody wrote must not meet a product.
        own_rows = torch.arange(longest, device=device) < ends
        self._slots = slots.where(own_rows, slots[:, :1])  # [R, L]
        self._own_rows = own_rows
        self._masks: dict[tuple[bool, int | None, int], Tensor] = {}
        self.packed = self._rows.flatten()[self._places]

    def attend(self, query: Tensor, store: LayerStore, rule: Rule) -> Tensor:
        """[rows, heads, value_dim] of the rows `packed`."""
        gathered = query[0, :, self._rows].transpose(0, 1)  # [R, heads, N, key_dim]
        key = store.keys[self._slots].transpose(1, 2)  # [R, kv_heads, L, key_dim]
        value = store.values[self._slots].transpose(1, 2)
        mask = self._mask(rule, query.shape[1] // store.keys.shape[1], query.dtype)
        return attend(gathered, key, value, mask, rule).flatten(0, 1)[self._places]

    def _mask(self, rule: Rule, groups: int, dtype: torch.dtype) -> Tensor:
        """[R, 1, groups * N, L]"""
        key = rule.causal, rule.window, groups
        if key not in self._masks:
            positions = torch.arange(self._slots.shape[1], device=self._slots.device)
            if rule.causal:
                allowed = visible(self._queries, positions, rule.window)
            else:
                allowed = self._own_rows[:, None].expand(-1, self._queries.shape[1], -1)
            self._masks[key] = additive(allowed.repeat(1, groups, 1)[:, None], dtype)
        return self._masks[key]
