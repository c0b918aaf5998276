"""What bounds decoding here: bytes read per pass, the memory's bandwidth, the measured cost of a pass by its rows."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import blocks_for
from forerun.target.dtypes import dtype_named

ROWS = (1, 2, 3, 4, 5, 7, 8, 16)
CONTEXT = 256
"""Tokens before the measured rows, where the model has so many positions."""


def measure(target: Path, draft: Path, dtype: str, threads: int, repeats: int) -> dict[str, Any]:
    """Bandwidth in GB/s, and per model the bytes of a pass and the milliseconds of a pass of each number of rows.

    Our pass and that of the stock model are timed in turn, so that both meet the same disturbances.
    """
    torch.set_num_threads(threads)
    models = {}
    for role, folder in (("target", target), ("draft", draft)):
        models[role] = _model_costs(folder, dtype, repeats)
        print(f"{role}: {models[role]['forerun_ms']}", file=sys.stderr)
    return {"bandwidth_gb_s": bandwidth(), "context": models["target"]["context"], "models": models}


def bandwidth(repeats: int = 9) -> float:
    """GB/s of reading, with all threads: the best of several sums over 1 GiB that no cache holds."""
    data = torch.ones(2**28, dtype=torch.float32)
    best = min(_timed(data.sum) for _ in range(repeats))
    return data.nbytes / best / 1e9


def _model_costs(folder: Path, dtype: str, repeats: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from forerun.target.load import load_target

    logging.disable_progress_bar()

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_named(dtype)).eval()
    ours = load_target(str(folder), dtype=dtype)  # type: ignore[arg-type]
    context = min(CONTEXT, ours.window - max(ROWS))
    count, generator = context + max(ROWS), torch.Generator().manual_seed(0)
    ids = torch.randint(0, ours.vocab_size, (count,), generator=generator).tolist()
    with torch.inference_mode():
        passes = {"forerun": _our_pass(ours, ids, context), "transformers": _stock_pass(stock, ids, context)}
        seconds: dict[tuple[str, int], list[float]] = {}
        for _ in range(repeats):
            for rows in ROWS:
                for name, one in passes.items():
                    seconds.setdefault((name, rows), []).append(one(rows))
    return {"bytes": weight_bytes(stock), "context": context} | {
        f"{name}_ms": {str(rows): round(1e3 * median(seconds[name, rows]), 2) for rows in ROWS} for name in passes
    }


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that a pass reads whole: all but the embedding, of which it reads one line per token."""
    embedding = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    tied = {id(p) for m in model.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters()}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in embedding or id(p) in tied)


def _our_pass(target: Target, ids: list[int], context: int) -> Callable[[int], float]:
    """Seconds of a verify pass of so many rows behind the context."""
    blocks = list(range(blocks_for(len(ids))))
    target.allocate(len(blocks))
    target.forward(Batch([Segment(ids[:context], 0, blocks, 0)]))

    def one(rows: int) -> float:
        batch = Batch([Segment(ids[context : context + rows], context, blocks, rows)])
        return _timed(lambda: target.forward(batch))

    return one


def _stock_pass(model: Any, ids: list[int], context: int) -> Callable[[int], float]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    # The argument is being renamed: past_key_values until 5.39, cache from 5.24 on.
    known = inspect.signature(model.forward).parameters
    options = {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
    model(torch.tensor([ids[:context]]), **options)

    def one(rows: int) -> float:
        tokens = torch.tensor([ids[context : context + rows]])
        seconds = _timed(lambda: model(tokens, **options))
        cache.crop(-rows)
        assert cache.get_seq_length() == context, "crop has changed its meaning again"
        return seconds

    return one


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------ what follows


def prediction(costs: dict[str, Any], k: int, accepted_length: float) -> dict[str, float]:
    """Speed-ups over plain decoding that K serial drafts of the smaller model can give.

    Args:
        costs: what `measure` returned.
        k: drafts per round.
        accepted_length: mean tokens a round yields, bonus included.

    Returns:
        from_passes: with the measured passes and nothing else, length * T(1) / (K * D(1) + T(K + 1)).
        from_bytes: if every pass cost its bytes at the measured bandwidth and further rows nothing,
            length * bytes(target) / (K * bytes(draft) + bytes(target)).
    """
    target, draft = costs["models"]["target"], costs["models"]["draft"]
    verify = at_rows(target["forerun_ms"], k + 1)
    passes = accepted_length * target["forerun_ms"]["1"] / (k * draft["forerun_ms"]["1"] + verify)
    size = accepted_length * target["bytes"] / (k * draft["bytes"] + target["bytes"])
    return {"from_passes": passes, "from_bytes": size}


def at_rows(costs: dict[str, float], rows: int) -> float:
    """The cost of a pass of so many rows, a straight line between measured ones."""
    known = sorted((int(r), ms) for r, ms in costs.items())
    below = max((pair for pair in known if pair[0] <= rows), default=known[0])
    above = min((pair for pair in known if pair[0] >= rows), default=known[-1])
    if below[0] == above[0]:
        return below[1]
    return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])
