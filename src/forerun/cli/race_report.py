"""What `forerun demo` prints: one table, what was proven, and what was not."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.bench.machine import Spread, versions
from forerun.bench.race import Course, Standing
from forerun.engine.profile_key import cpu_name
from forerun.target.base import Target
from forerun.target.dtypes import dtype_name

NARROWEST = 100
"""Columns of a table that is not printed on a terminal."""
COLUMNS = (
    "drafter", "mode", "plain\ntokens/s", "drafted\ntokens/s", "speed-up", "accepted\nlength", "accepted by\nposition",
    "same\ntokens",
)  # fmt: skip
NOT_PROVEN = (
    "other models, prompts and dtypes: in half precision two nearly equal logits may change places",
    "the law of sampling with --verify-mode rejection (the default): that is the work of `forerun verify`",
    "speed anywhere else: it depends on the machine, the model, the drafter and the text",
)


@dataclass
class Report:
    """A race and its circumstances."""

    target: Target
    course: Course
    absent: dict[str, str]
    standings: list[Standing] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        return not any(standing.partings for standing in self.standings)

    @property
    def prompts(self) -> int:
        return max(len(standing.laps) for standing in self.standings)

    @property
    def setting(self) -> str:
        """Where and how it was measured, without which no number means anything."""
        tokens = next(iter(self.course.modes.values())).max_tokens
        place = cpu_name() if self.target.device.type == "cpu" else torch.cuda.get_device_name(self.target.device)
        threads = _count(torch.get_num_threads(), "thread")
        return (
            f"target {self.target.name}, {dtype_name(self.target.dtype)}, {place}, {threads}, "
            f"torch {torch.__version__}; "
            f"{_count(self.prompts, 'prompt')}, {tokens} tokens each, end of sequence ignored, one request at a time; "
            f"median and range over prompts; {self.seconds:.0f} s"
        )

    @property
    def proven(self) -> str:
        names = ", ".join(dict.fromkeys(standing.drafter for standing in self.standings))
        tokens = sum(len(lap.drafted.token_ids) for standing in self.standings for lap in standing.laps)
        return (
            f"on {_count(self.prompts, 'prompt')}, greedy and sampled with a seed, every one of {tokens:,} tokens "
            f"decoded with {names} is the token of plain decoding"
        )

    def document(self) -> dict[str, Any]:
        """The JSON of the command."""
        return {
            "same_tokens": self.same,
            "target": self.target.name,
            "dtype": dtype_name(self.target.dtype),
            "device": str(self.target.device),
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "prompts": self.prompts,
            "seconds": self.seconds,
            "results": [_as_object(standing) for standing in self.standings],
            "left_out": self.absent,
        }

    def show(self, console: Console) -> None:
        """The table and the sentences below it."""
        if not console.is_terminal:
            console.width = max(console.width, NARROWEST)
        console.print(self._table(), soft_wrap=False)
        for name in dict.fromkeys(standing.drafter for standing in self.standings):
            console.print(Text(self._verdict(name)), soft_wrap=True)
        console.print(Text(self.setting, "dim"), soft_wrap=False)
        for name, reason in self.absent.items():
            console.print(Text(f"left out: {name} ({reason})"), soft_wrap=False)
        for standing in self.standings:
            for parting in standing.partings:
                console.print(Text(f"DIFFERS: {standing.drafter}, {standing.mode}: {parting}", "bold red"))
        if self.same:
            console.print(Text("Proven here: ", "bold green") + Text(f"{self.proven}."), soft_wrap=False)
        for sentence in NOT_PROVEN:
            console.print(Text("Not proven: ", "bold") + Text(f"{sentence}."), soft_wrap=False)

    def _verdict(self, drafter: str) -> str:
        """One line for each drafter."""
        mine = [standing for standing in self.standings if standing.drafter == drafter]
        speeds = [f"{s.mode} {s.rate.median:.3g} tokens/s (plain {s.plain_rate.median:.3g})" for s in mine]
        return f"{drafter}: {', '.join(speeds)}; same tokens: {'NO' if any(s.partings for s in mine) else 'yes'}"

    def text(self) -> str:
        """The same for a file."""
        console = Console(file=io.StringIO(), width=NARROWEST, highlight=False)
        self.show(console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def _table(self) -> Table:
        table = Table(title="Each drafter beside plain decoding of the same prompts in the same process")
        for name in COLUMNS:
            table.add_column(name, overflow="fold")
        for standing in self.standings:
            table.add_row(*_row(standing), style=None if not standing.partings else "bold red")
        return table


def _row(standing: Standing) -> list[str]:
    stats = standing.stats
    length = "-" if stats.mean_accepted_length is None else f"{stats.mean_accepted_length:.2f}"
    positions = " ".join("-" if rate is None else f"{rate:.2f}" for rate in stats.acceptance_by_position)
    same = "yes" if not standing.partings else f"NO ({len(standing.partings)} of {len(standing.laps)})"
    speeds = [_spread(spread) for spread in (standing.plain_rate, standing.rate, standing.speedup)]
    return [standing.drafter, standing.mode, *speeds, length, positions or "-", same]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _spread(spread: Spread) -> str:
    return f"{spread.median:.3g}\n{spread.low:.3g}-{spread.high:.3g}"


def _as_object(standing: Standing) -> dict[str, Any]:
    stats = standing.stats
    return {
        "drafter": standing.drafter,
        "mode": standing.mode,
        "same_tokens": not standing.partings,
        "differences": [_finite(asdict(parting)) for parting in standing.partings],
        "plain_tokens_per_second": standing.plain_rate.as_dict(),
        "tokens_per_second": standing.rate.as_dict(),
        "speedup": standing.speedup.as_dict(),
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_by_position": stats.acceptance_by_position,
    }


def _finite(parting: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a margin that does not exist is null."""
    return {name: None if value == float("inf") else value for name, value in parting.items()}
