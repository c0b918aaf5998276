"""Computes the target's features of prepared samples once, into a bounded store that all training runs then read.

    python recipes/qwen/features.py --target TARGET --data data --store features --store-gb 30 --taps 2,7,12,17,22

Without it the first run on a data set would pay for all others. Run again, it computes what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.target.allocator import keep_freed_memory
from forerun.target.load import load_target
from forerun.training.data import Sample, open_split
from forerun.training.features import FeatureSource, open_source
from forerun.training.order import micro_batches

PASS_TOKENS = 4096
SAY_EVERY = 30.0
"""Seconds."""


@dataclass
class Filling:
    """What a call has done."""

    samples: int = 0
    tokens: int = 0
    computed: int = 0
    """Samples that were not stored before."""
    declined: int = 0
    """Samples that found no room; training computes them in every epoch."""
    cpu_seconds: float = 0.0
    seconds: float = 0.0


def passes(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Neighbours, as many as make a pass."""
    for group in micro_batches([len(sample.token_ids) for sample in samples], PASS_TOKENS):
        yield [samples[i] for i in group]


def fill(source: FeatureSource, samples: Sequence[Sample], total: int) -> Filling:
    """Has the features of all samples computed and stored that are not there yet."""
    assert source.store is not None
    done, began, cpu, said = Filling(), time.monotonic(), time.process_time(), time.monotonic()
    for group in passes(samples):
        source.batch(group)
        done.samples += len(group)
        done.tokens += sum(len(sample.token_ids) for sample in group)
        done.seconds, done.cpu_seconds = time.monotonic() - began, time.process_time() - cpu
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            left = (total - done.tokens) * done.seconds / done.tokens
            print(f"features of {done.tokens:,} of {total:,} tokens, about {left:.0f} s left", file=sys.stderr)
    done.computed, done.declined = source.captured, source.store.counts.declined
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of `forerun data prepare`")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--store-gb", type=float, required=True)
    parser.add_argument("--store-dtype", choices=("bfloat16", "fp8"), default="bfloat16")
    parser.add_argument("--taps", required=True, help="hidden states, such as 2,7,12,17,22")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--report", type=Path, help="JSON lines: what each call did")
    options = parser.parse_args()
    keep_freed_memory()
    target = load_target(options.target, threads=options.threads)
    parts = [part for part in open_split(options.data) if part is not None]
    samples = [sample for part in parts for sample in part]
    source = open_source(
        target, [int(tap) for tap in options.taps.split(",")], store=options.store, gb=options.store_gb,
        dtype=options.store_dtype, normalizer=True,
    )  # fmt: skip
    done = fill(source, samples, sum(len(sample.token_ids) for sample in samples))
    print(source.describe(), file=sys.stderr)
    assert source.store is not None
    if options.report is not None:
        per_token = source.store.layout.bytes_per_token
        _record(options.report, vars(done) | {"threads": options.threads, "bytes_per_token": per_token})
    return 0


def _record(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    sys.exit(main())
