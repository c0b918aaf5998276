"""Checks of a target: its window, vocabulary, template, weights, and what verifying costs with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import torch

from forerun.bench import machine
from forerun.cli.checks.check import Check
from forerun.cli.console import progress
from forerun.cli.prompts import embedded_prompts
from forerun.target.base import BLOCK_SIZE
from forerun.target.dtypes import dtype_name
from forerun.target.fingerprint import fingerprint
from forerun.target.hf import HFTarget
from forerun.target.noise import measure_noise
from forerun.target.packed import PackedLinear

ROUND_TRIP = "Größe 12,5 μm — naïve café, 你好世界 🎉\n\tdef f(x):\n\t\treturn x ** 2  # привет, مرحبا\r\n"
"""Accents, other scripts, an emoji, tabs, two kinds of line end. All characters composed: some tokenizers normalise."""
ROWS = (1, 2, 3, 5, 9, 17)
"""Rows of the verify passes measured: K + 1 for K = 0, 1, 2, 4, 8, 16."""
REPEATS = 5
NOISE_TOKENS = 128
MIB = 1 << 20


def target_checks(target: HFTarget) -> Iterator[Check]:
    """Every check of one loaded target. The last ones use its KV storage: an engine is made after them."""
    size, broken = _read_weights(target)
    what = f"{target.name}: {type(target.model).__name__}, {size / MIB:,.1f} MiB of weights"
    yield Check("target", "ok", f"{what}, {dtype_name(target.dtype)} on {target.device}")
    yield Check("fingerprint", "ok", ", ".join(f"{k} {v[:8]}" for k, v in fingerprint(target).to_dict().items()))
    yield Check.of(
        "weights", not broken, f"{len(broken)} tensors are not finite: {', '.join(broken[:3])}" if broken else "finite",
        "finite numbers", "the checkpoint is damaged; or try --dtype float32", "error",
    )  # fmt: skip
    yield Check("window", "ok", "; ".join([f"{target.window} positions", *target.anatomy.notes]))
    kinds = Counter("full" if a.window is None else f"sliding {a.window}" for a in target.anatomy.attentions)
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    yield Check("attention", "ok", f"{found}; every layer can be cut back; {target.attention_reason}")
    yield Check("linear layers", "ok", target.linear_reason)
    yield Check("kv storage", "ok", f"{target.block_bytes // BLOCK_SIZE:,} bytes a token")
    yield from _vocabulary(target)
    template = target.tokenizer.chat_template
    found = "none: a completion model, --chat will not work" if template is None else f"{len(template)} characters"
    yield Check("chat template", "ok", found)
    if target.sampling_defaults:
        defaults = ", ".join(f"{name} {value}" for name, value in target.sampling_defaults.items())
        yield Check("sampling defaults", "ok", defaults)
    yield _noise(target)
    yield _verify_cost(target, size)


def _read_weights(target: HFTarget) -> tuple[int, list[str]]:
    """Bytes of all weights, and the names of those that hold NaN or infinity.

    Where a model keeps ids or rows out, -inf is no damage: in buffers, which are masks, and in the bias of its head.
    """
    size, broken = 0, []
    packed = ((n, m.weight) for n, m in target.model.named_modules() if isinstance(m, PackedLinear))
    masks = {id(buffer) for buffer in target.model.buffers()}
    head = cast(Any, target.model).get_output_embeddings()
    masks.add(id(getattr(head, "bias", None)))
    for name, tensor in chain(target.model.named_parameters(), target.model.named_buffers(), packed):
        size += tensor.numel() * tensor.element_size()
        kept_out = tensor == -torch.inf if id(tensor) in masks else torch.zeros((), dtype=torch.bool)
        if not bool((torch.isfinite(tensor) | kept_out.to(tensor.device)).all()):
            broken.append(name)
    return size, broken


def _vocabulary(target: HFTarget) -> Iterator[Check]:
    tokenizer = target.tokenizer
    found = f"{target.vocab_size} logits, {tokenizer.size} tokens, {len(tokenizer.special_ids)} of them special"
    yield Check.of(
        "vocabulary", tokenizer.size <= target.vocab_size, found, "a logit for every token of the tokenizer",
        "the tokenizer belongs to another model", "error",
    )  # fmt: skip
    ends = ", ".join(f"{i} {tokenizer.decode([i], False)!r}" for i in sorted(target.eos_token_ids))
    yield Check.of(
        "end of sequence", bool(ends), ends or "none", "an id that ends the text", "give --max-tokens, --stop"
    )
    back = tokenizer.decode(tokenizer.encode(ROUND_TRIP, False))
    same = back == ROUND_TRIP
    yield Check.of(
        "tokenizer", same, "gives text of six scripts back" if same else f"gives back {back!r}",
        repr(ROUND_TRIP), "generated text is fine; prompts lose what the tokenizer cannot write",
    )  # fmt: skip


def _noise(target: HFTarget) -> Check:
    """Whether a pass over many rows picks the tokens that passes over single rows pick (conventions 16.3)."""
    ids = [token for text in embedded_prompts(4) for token in target.tokenizer.encode(text)]
    ids = ids[: min(NOISE_TOKENS, target.window - 1)]
    if len(ids) < 2:
        return Check("pass noise", "ok", f"not measured: a window of {target.window} has no room for it")
    block = min(5, len(ids) - len(ids) // 2)
    noise = measure_noise(target, ids, block)
    found = (
        f"{noise.argmax_flips} of {noise.rows} greedy tokens differ between passes of 1 and of {block} rows; logits by "
        f"at most {noise.max_difference:.2g}, smallest top-2 margin {noise.smallest_margin:.2g}"
    )
    return Check.of(
        "pass noise", noise.argmax_flips == 0, found, "no difference",
        "--dtype float32 where every token must be that of plain decoding",
    )  # fmt: skip


def _verify_cost(target: HFTarget, weight_bytes: int) -> Check:
    """How much dearer a pass gets with the drafts it verifies: below 2 for K = 4 is where drafting can pay."""
    with progress("measuring passes", len(ROWS) * (REPEATS + 1)) as advance:
        cost = machine.verify_cost(target, ROWS, repeats=REPEATS, advance=advance)
    one = cost[1].median
    steps = ", ".join(f"{n}: {spread.median / one:.2f}" for n, spread in cost.items() if n > 1)
    floor = weight_bytes / machine.read_bandwidth(target.device).median / 1e6
    found = f"one row {cost[1]} (reading the weights alone takes {floor:.3g} ms); times as long with rows {steps}"
    dear = cost.get(5, cost[1]).median / one
    return Check.of(
        "verify cost", dear < 5, found, "5 rows (K = 4) cheaper than five passes of one row",
        "drafting cannot pay here; try another --dtype, or fewer --threads",
    )  # fmt: skip
