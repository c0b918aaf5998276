"""`forerun data prepare`: records in, samples out, and an account of what was left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import forerun
from forerun.errors import OptionError
from forerun.target.fingerprint import template_hash, tokenizer_hash
from forerun.target.outline import Outline
from forerun.training.data.dataset import Sample
from forerun.training.data.records import Chat, read_records
from forerun.training.data.rendering import Rendering
from forerun.training.data.report import Tally
from forerun.training.data.samples import Choice, Samples
from forerun.training.data.sources import Sources
from forerun.training.data.writer import NothingLeft, new_folder, write_dataset


@dataclass
class Preparation:
    """One pass over the records of some sources, for one target."""

    sources: Sources
    target: Outline
    rendering: Rendering
    choice: Choice
    as_chat: bool = False
    records: int = 0
    rendered: int = 0
    """Samples that the chat template has a part in; the others are plain text."""
    of_others: int = 0
    """Samples whose answers no target is known to have written."""
    dropped: Tally = field(default_factory=Tally)

    def again(self) -> Preparation:
        """The same pass, not begun."""
        return replace(self, records=0, rendered=0, of_others=0, dropped=Tally())

    def samples(self, advance: Callable[[], None] = lambda: None) -> Iterator[tuple[Sample, str]]:
        """Samples with their groups. `advance` is called after each record.

        Raises:
            OptionError: a record of unknown shape, or a template that does not say where its answers lie.
        """
        maker = Samples(self.rendering, self.choice)
        for record in read_records(iter(self.sources), self.sources.option, self.as_chat):
            self.records += 1
            if isinstance(record, tuple):
                where, dropped = record
                self.dropped.add(dropped.reason, where, dropped.detail)
            else:
                yield from self._kept(maker, record)
            advance()

    def _kept(self, maker: Samples, record: Any) -> Iterator[tuple[Sample, str]]:
        for one in maker.of(record):
            if isinstance(one, Sample):
                self.rendered += isinstance(record.body, Chat)
                self.of_others += record.finish_reason is None
                yield one, record.group
            else:
                name, dropped = one
                self.dropped.add(dropped.reason, name, dropped.detail)

    def describe(self) -> dict[str, Any]:
        """For the manifest. The options and the template's hash belong to what a drafter is trained on (bugs, TS-9)."""
        tokenizer = self.target.tokenizer
        return {
            "forerun": forerun.__version__,
            "target": self.target.name,
            "tokenizer": {"hash": tokenizer_hash(tokenizer), "size": tokenizer.size},
            "template": {
                "hash": template_hash(tokenizer), "options": self.rendering.options, "rendered": self.rendered,
            },
            "options": {**asdict(self.choice), "apply_chat_template": self.as_chat},
            "sources": list(self.sources.names),
            "records": self.records,
            "dropped": self.dropped.as_dict(),
        }  # fmt: skip


def write(
    preparation: Preparation,
    folder: Path,
    held_out: float = 0.0,
    overwrite: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Prepares everything into a folder, which appears when it is complete.

    Args:
        preparation: not begun.
        folder: see `Dataset`; split into `train` and `held_out` if something is held out.
        held_out: share of the groups to hold out.
        overwrite: replace a dataset that is there.
        advance: called after each record.

    Returns:
        The manifest, see `write_dataset`.

    Raises:
        OptionError: the folder cannot be written, nothing is left to learn from, or see `Preparation.samples`.
    """
    with new_folder(folder, overwrite) as part:
        try:
            return write_dataset(part, preparation.samples(advance), preparation.describe, held_out)
        except NothingLeft as error:
            reasons = "; ".join(line.strip() for line in preparation.dropped.lines())
            raise OptionError(
                preparation.sources.option, f"nothing is left to learn from: {reasons or 'it is empty'}"
            ) from error
