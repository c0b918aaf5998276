"""The loop of a benchmark: every configuration on one prompt, then on the next, each finished row on disk at once."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contenders import Config, Contenders, Job
from filelock import FileLock
from rows import Rows, settle_setup
from summary import busy


def add_measuring_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `run` that do not depend on what is compared; `Measurement` reads them, and `--out`, `--threads`."""
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--configs", nargs="+", default=["*"], metavar="PATTERN", help="e.g. 'forerun-small-*' '*-t0-b1'"
    )
    parser.add_argument("--trials", type=int, default=1, help="times every row is measured")
    parser.add_argument("--minutes", type=float, help="stop before the first row that would begin after this")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of sampling")
    parser.add_argument(
        "--again-below",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="measure a row again that got less than this share of its threads' processor time (a busy machine)",
    )


@dataclass
class Measurement:
    """One call of `run`: what is measured, on what, until when."""

    args: argparse.Namespace
    prompts: Mapping[int, list[int]]
    """Token ids by the number that rows carry."""
    contenders: Contenders
    rows: Rows
    deadline: float
    margins: bool
    """Whether forerun's runs also record how far the best logit led."""

    def wanted(self, configs: Sequence[Config]) -> list[Config]:
        """Those that `--configs` names."""
        return [c for c in configs if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in self.args.configs)]

    def measure(self, configs: Sequence[Config], group: tuple[int, ...]) -> None:
        """Measures what is missing of these configurations on one group of prompts, in an order of its own.

        Raises:
            TimeoutError: time is up.
        """
        for trial in range(self.args.trials):
            for config in shuffled(configs, f"{self.args.seed}/{group[0]}/{trial}"):
                before = self.rows.get((group, config.name, trial))
                if before is not None and busy(before, self.args.threads) >= self.args.again_below:
                    continue
                if time.monotonic() > self.deadline:
                    raise TimeoutError
                row = {"prompts": list(group), "config": config.name, "trial": trial}
                row |= self._run(config, self._job(config, group, trial))
                self.rows.append(row)
                speed = sum(map(len, row["ids"])) / row["seconds"]
                print(
                    f"{len(self.rows):5d}  prompt {group[0]:3d}  {config.name:36s} {speed:6.2f} tok/s", file=sys.stderr
                )

    def _job(self, config: Config, group: tuple[int, ...], trial: int) -> Job:
        margins = self.margins and config.engine == "forerun"
        seed = self.args.seed + 1000 * trial + group[0]
        return Job([self.prompts[i] for i in group], self.args.max_tokens, seed, margins)

    def _run(self, config: Config, job: Job) -> dict[str, Any]:
        run = self.contenders.run(config, job)
        return {
            "seconds": round(run.seconds, 4),
            "cpu_seconds": round(run.cpu_seconds, 3),
            "prompt_tokens": [len(prompt) for prompt in job.prompts],
            "ids": run.ids,
            "arrivals": run.arrivals,
            "target_passes": run.target_passes,
            "draft_passes": run.draft_passes,
            "counters": run.counters,
            "margins": [[round(margin, 6) for margin in line] for line in run.margins],
            "load_average": round(os.getloadavg()[0], 2),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def run(
    args: argparse.Namespace,
    setup: Mapping[str, Any],
    prompts: Mapping[int, list[int]],
    contenders: Contenders,
    rows: Callable[[Measurement], None],
    *,
    margins: bool = False,
) -> int:
    """Measures `rows` into the folder `--out`: 0 when all of them are there, 3 when `--minutes` were over first.

    Raises:
        ValueError: the folder holds rows of another setup.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    with FileLock(args.out / "run.lock", timeout=0):
        settle_setup(args.out, dict(setup))
        deadline = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes
        try:
            rows(Measurement(args, prompts, contenders, Rows(args.out), deadline, margins))
        except TimeoutError:
            print(f"--minutes {args.minutes:g} are over; the same command goes on from here", file=sys.stderr)
            return 3
    return 0


def shuffled(configs: Sequence[Config], key: str) -> list[Config]:
    """An order that depends on the key alone: a continued run goes on in the one it began with."""
    order = sorted(configs, key=lambda config: config.name)
    random.Random(key).shuffle(order)
    return order


def rendered(path: Path, folder: Path, limit: int) -> list[list[int]]:
    """Token ids of the first turns of `{"turns": [...]}`, in the target's chat template where it has one, or of plain
    texts `{"prompt": ...}`, which no template changes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()][:limit]
    if len(records) < limit:
        raise ValueError(f"--prompts: {path} has {len(records)} prompts, --limit asks for {limit}")
    return [_ids(tokenizer, record) for record in records]


def _ids(tokenizer: Any, record: Mapping[str, Any]) -> list[int]:
    text = record["turns"][0] if "turns" in record else record["prompt"]
    if tokenizer.chat_template is None or "turns" not in record:
        plain: list[int] = tokenizer.encode(text)
        return plain
    turn = [{"role": "user", "content": text}]
    said = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(said, add_special_tokens=False)
    return ids


def sum_of(path: Path) -> str:
    """sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
