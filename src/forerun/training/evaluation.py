"""What a drafter is worth so far, on samples it is not trained on.

Two kinds of numbers, kept apart by name: the drafter's own losses over given text (`teacher_forced`), and real decoding
by the engine, which is what a user will get and what the best checkpoint is chosen by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.learned import Learner
from forerun.engine import Engine, EngineOptions
from forerun.engine.propose import LoadedDrafter
from forerun.engine.stats import DecodingStats, total
from forerun.sampling import Sampling
from forerun.target.blocks import blocks_for
from forerun.training.confidence import Observed, Round, confidence_error
from forerun.training.config import TrainingConfig
from forerun.training.metrics import Sums
from forerun.training.order import micro_batches
from forerun.training.step import Source

if TYPE_CHECKING:
    from accelerate import Accelerator

    from forerun.training.features import Sample

TOGETHER = 8
"""Prompts decoded at once on one device."""
REPORTED = (
    "mean_accepted_length", "acceptance_by_position", "prefix_survival", "tokens_per_step", "draft_acceptance_rate",
    "drafting_rounds", "target_steps", "emitted", "drafter_faults", "invalid_drafts",
)  # fmt: skip
"""Of the engine's statistics, with its names (methods, 9)."""


class Interrupted(Exception):
    """A stop was asked for; the evaluation is void."""


@dataclass(frozen=True)
class Decoding:
    """Real decoding at one temperature."""

    temperature: float
    prompts: int
    stats: DecodingStats
    rounds: Sequence[Round]

    def as_dict(self) -> dict[str, Any]:
        counts = self.stats.as_dict()
        known = {name: counts[name] for name in REPORTED if name in counts}
        return {"temperature": self.temperature, "prompts": self.prompts} | known | confidence_error(self.rounds)


@dataclass(frozen=True)
class Evaluation:
    """All numbers after one step."""

    step: int
    teacher_forced: Sums
    decoding: Sequence[Decoding]

    @property
    def score(self) -> float | None:
        """Mean accepted length of real decoding, over the temperatures; what the best checkpoint is chosen by."""
        lengths = [d.stats.mean_accepted_length for d in self.decoding]
        known = [length for length in lengths if length is not None]
        return sum(known) / len(known) if known else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "event": "evaluation", "step": self.step, "score": self.score,
            "teacher_forced": self.teacher_forced.as_dict(),
            "decoding": [one.as_dict() for one in self.decoding],
        }  # fmt: skip


class Evaluator:
    """Evaluates a drafter on held-out samples, shared among the devices.

    Args:
        samples: held out.
        source: of features.
        config: complete.
        accelerator: the other devices.
        stopping: asked between two steps of decoding; true ends the evaluation with `Interrupted`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        source: Source,
        config: TrainingConfig,
        accelerator: Accelerator,
        stopping: Callable[[], bool] = lambda: False,
    ):
        self.samples, self.source, self.config = samples, source, config
        self.accelerator, self.stopping = accelerator, stopping
        self._mine = list(samples)[accelerator.process_index :: accelerator.num_processes]

    def evaluate(self, drafter: Learner, step: int) -> Evaluation:
        """With the weights the drafter has now. Interrupted on every device if one was asked to stop."""
        training = drafter.network.training
        drafter.network.eval()
        try:
            sums = self._teacher_forced(drafter)
            parts = [self._decode(drafter, t) for t in self.config.eval_temperature]
            done = True
        except Interrupted:
            sums, parts, done = Sums(), [], False
        finally:
            drafter.network.train(training)
        gathered = self._gathered([(done, sums, parts)])
        if not all(finished for finished, _, _ in gathered):
            raise Interrupted
        return Evaluation(step, Sums.of(one for _, one, _ in gathered), _merged([one for _, _, one in gathered]))

    def _gathered(self, mine: list[Any]) -> list[Any]:
        if self.accelerator.num_processes == 1:
            return mine
        from accelerate.utils import gather_object

        return list(gather_object(mine))

    # -------------------------------------------------------------------------------------------------- teacher forced

    @torch.no_grad()
    def _teacher_forced(self, drafter: Learner) -> Sums:
        """The drafter's own losses on the held-out text, with the same exercises every time."""
        assert self.config.micro_batch_tokens is not None
        sums = Sums()
        sizes = [len(sample.token_ids) for sample in self._mine]
        for places in micro_batches(sizes, self.config.micro_batch_tokens):
            if self.stopping():
                raise Interrupted
            batch = self.source.batch([self._mine[i] for i in places])
            exercise = drafter.prepare(batch, torch.Generator().manual_seed(self.config.seed))
            with self.accelerator.autocast():
                losses = drafter.losses(batch, exercise, 1.0)
            sums.add(float(losses.total), exercise.weight, losses.metrics)
        return sums

    # -------------------------------------------------------------------------------------------------------- decoding

    def _decode(self, drafter: Learner, temperature: float) -> Decoding:
        """This device's prompts, completed by the engine with the drafter as it would be after saving and loading."""
        watched = Observed(drafter.for_decoding(drafter.target.dtype))
        prompts = [prompt_of(sample) for sample in self._mine]
        if not prompts:
            return Decoding(temperature, 0, DecodingStats(), [])
        window = drafter.target.window
        samplings = [
            Sampling(temperature=temperature, max_tokens=min(self.config.eval_tokens, window - len(p)), seed=i)
            for i, p in enumerate(prompts)
        ]
        try:
            with self._engine(drafter, watched, max(map(len, prompts))) as engine:
                requests = engine.submit(prompts, samplings)
                while any(request.finish_reason is None for request in requests):
                    if self.stopping():
                        raise Interrupted
                    engine.step()
        finally:
            drafter.target.allocate(0)
        for request in requests:
            Engine.result(request)  # raises the error of a request that failed
        return Decoding(temperature, len(prompts), total(r.stats for r in requests), watched.rounds)

    def _engine(self, drafter: Learner, watched: Observed, longest: int) -> Engine:
        """With KV storage for no more than these prompts need."""
        target = drafter.target
        together = min(TOGETHER, len(self._mine))
        rows = min(longest + self.config.eval_tokens, target.window) + 2 * (watched.max_draft or watched.default_draft)
        blocks = together * (blocks_for(rows) + 1)
        options = EngineOptions(
            max_num_seqs=together, kv_cache_memory_bytes=blocks * (target.block_bytes + watched.block_bytes)
        )
        return Engine(target, [LoadedDrafter(watched, SpeculativeConfig(method=drafter.name))], options)


def _merged(ranks: Sequence[Sequence[Decoding]]) -> list[Decoding]:
    """One decoding per temperature out of every device's part."""
    return [
        Decoding(
            same[0].temperature,
            sum(part.prompts for part in same),
            total(part.stats for part in same),
            [one for part in same for one in part.rounds],
        )
        for same in zip(*ranks, strict=True)
    ]


def prompt_of(sample: Sample) -> list[int]:
    """What comes before the target's first own token; the first half of a text that is its own from the beginning."""
    marks = sample.loss_mask.nonzero()[0]
    first = int(marks[0]) if len(marks) else len(sample.token_ids)
    length = first if first > 0 else len(sample.token_ids) // 2
    return [int(token) for token in sample.token_ids[: max(1, length)]]
