"""What a run will need, before it begins: memory, disk and time, each line with its arithmetic.

`plan` is a pure function of a `Workload`: of a real run (`workload_of`), or of numbers for a machine that is not here
(`training.eight_billion`, the example of the documentation).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from forerun.drafters.learned import Held
from forerun.target.allocator import GAPS
from forerun.target.base import BLOCK_SIZE
from forerun.target.packed import Weights, weights_of
from forerun.training.metrics import resident_memory
from forerun.training.optimizer import moments

if TYPE_CHECKING:
    from forerun.training.features import Sample
    from forerun.training.setup import Job

UTILISATION = 0.4
"""Share of a device's matrix rate that training reaches: assumed."""
FP32 = 4
STEPS_LOOKED_AT = 64
"""Of the run, for its largest pass."""
CUDA_CONTEXT = Held("CUDA context", 1e9, "driver, kernels and libraries, assumed")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The numbers a plan is made of."""

    target_parameters: int
    target_itemsize: int
    """Bytes of a target weight, hence of a feature."""
    drafter_parameters: int
    saved_itemsize: int
    hidden_size: int
    states: int
    """Hidden states a token has in a batch: the taps, and the last one if it is none of them."""
    vocab_size: int
    draft_vocab_size: int
    kv_bytes: int
    """Of the target, per token."""
    kv_tokens: int
    """Whose keys and values exist at once: those of one pass of the target."""
    moments: int
    """Numbers that the optimiser keeps."""
    held: Sequence[Held]
    """By the drafter's pass (`Learner.plan_memory`)."""
    data_tokens: int
    steps: int
    tokens_per_step: float
    pass_tokens: int
    """Of the largest pass of the drafter."""
    ranks: int
    keep: int
    target_copied: int = 0
    """Of the target's parameters, those that are held a second time: a head packed beside the embedding it is."""
    rows_per_token: float = 1.0
    """Positions the drafter computes per token of the data, as its kind says (`Learner.plan_rows_per_token`)."""
    feature_bytes: int = 0
    """Of a token in a store; 0: not known."""
    half: bool = False
    """Linear layers compute in 2 bytes instead of 4."""
    average: bool = False
    store_bytes: int = 0
    table_parameters: int = 0
    """Of the drafter's, in an embedding and a head of its own: looked up, and counted with the logits."""
    head_width: int | None = None
    """Columns of the drafter's head; None: it is the target's."""
    process: Held | None = None
    """What is there before and beside all tensors."""
    start: Held | None = None
    """Of a start that is fitted, and gone before the first pass."""
    gaps: float = 0.0
    """Bytes that the heap takes beyond each byte of a pass."""


@dataclass(frozen=True)
class Line:
    """One number with where it comes from."""

    name: str
    value: float
    unit: str
    arithmetic: str


@dataclass(frozen=True)
class Plan:
    """Per device, if not said otherwise."""

    memory: Sequence[Line]
    disk: Sequence[Line]
    time: Sequence[Line]
    features: Sequence[Line] = ()
    """Of a token, and of all the data: what a store would hold."""

    @property
    def memory_bytes(self) -> float:
        return sum(line.value for line in self.memory)

    @property
    def disk_bytes(self) -> float:
        """Of the whole run."""
        return sum(line.value for line in self.disk)

    @property
    def seconds(self) -> float:
        return next(line.value for line in self.time if line.name == "time")

    def as_dict(self) -> dict[str, Any]:
        parts = {
            name: [asdict(line) for line in getattr(self, name)] for name in ("memory", "disk", "time", "features")
        }
        return parts | {
            "memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes, "seconds": self.seconds,
        }  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A few micro-batches of the run itself, timed."""

    tokens: int
    capture_seconds: float
    learn_seconds: float


def plan(work: Workload, flops_per_second: float, measured: Measured | None = None) -> Plan:
    """Memory, disk and time.

    Args:
        work: the numbers.
        flops_per_second: what one device reaches, utilisation included.
        measured: replaces the estimate of the time.
    """
    return Plan(_memory(work), _disk(work), _time(work, flops_per_second, measured), _features(work))


def _features(work: Workload) -> list[Line]:
    if not work.feature_bytes:
        return []
    total, size = work.data_tokens * work.feature_bytes, work.feature_bytes
    return [
        _bytes("of a token", size, "as --store-dtype stores it"),
        _bytes("of the data", total, f"{work.data_tokens:,} tokens x {size:,} bytes"),
    ]


def _memory(work: Workload) -> list[Line]:
    p = work.drafter_parameters
    lasting = [
        _bytes("target weights", work.target_parameters * work.target_itemsize,
               f"{work.target_parameters:,} x {work.target_itemsize} bytes"),
        _bytes("target KV", work.kv_tokens * work.kv_bytes, f"{work.kv_tokens:,} tokens x {work.kv_bytes:,} bytes"),
        _bytes("drafter weights", FP32 * p, f"{p:,} x 4 bytes"),
        _bytes("moments of the optimiser", FP32 * work.moments, f"{work.moments:,} x 4 bytes"),
    ]  # fmt: skip
    if work.target_copied:
        copied, size = work.target_copied, work.target_itemsize
        lasting.insert(1, _bytes("packed copy of its head", copied * size, f"{copied:,} x {size} bytes"))
    if work.process is not None:
        lasting.insert(0, _bytes(*work.process))
    if work.average:
        lasting.append(_bytes("average of the weights", FP32 * p, f"{p:,} x 4 bytes"))
    passing = _of_a_pass(work)
    together = sum(line.value for line in passing)
    if work.start is not None and work.start.size > together:
        text = f"{work.start.arithmetic}, before the passes, which take {together:,.0f} bytes"
        passing.append(_bytes("fitted start, more than a pass", work.start.size - together, text))
    return lasting + passing


def _of_a_pass(work: Workload) -> list[Line]:
    """What comes and goes with every pass of the drafter."""
    p, tokens = work.drafter_parameters, work.pass_tokens
    out = [
        _bytes("gradients", FP32 * p, f"{p:,} x 4 bytes"),
        _bytes("features", tokens * work.states * work.hidden_size * work.target_itemsize,
               f"{tokens:,} tokens x {work.states} states x {work.hidden_size:,} x {work.target_itemsize} bytes"),
        *(_bytes(*one) for one in work.held),
    ]  # fmt: skip
    if work.half:
        out.append(_bytes("weights in half precision", 2 * p, f"{p:,} x 2 bytes"))
    if work.gaps:
        together = sum(line.value for line in out)
        out.append(_bytes("gaps in the heap", work.gaps * together, f"{work.gaps:g} x {together:,.0f} bytes of a pass"))
    return out


def _disk(work: Workload) -> list[Line]:
    p = work.drafter_parameters
    numbers = p + work.moments + (p if work.average else 0)
    out = [
        _bytes("checkpoints", (work.keep + 1) * numbers * FP32,
               f"({work.keep} kept + 1 being written) x {numbers:,} weights, moments and averages x 4 bytes"),
        _bytes("best and last drafter", 2 * work.saved_itemsize * p, f"2 x {p:,} x {work.saved_itemsize} bytes"),
    ]  # fmt: skip
    if work.store_bytes:
        out.append(_bytes("feature store", work.store_bytes, "at most, --store-gb"))
    return out


def flops_per_token(work: Workload) -> tuple[float, str]:
    """Floating-point operations for a token of the data: the target forward, the teacher's head, the drafter forward
    and backward, and its head forward, backward to its input and, if it is its own, to its weights. Attention is left
    out."""
    target = 2 * work.target_parameters
    teacher = 2 * work.hidden_size * work.vocab_size
    width, learned = work.head_width or work.hidden_size, work.drafter_parameters - work.table_parameters
    head = 6 if work.table_parameters else 4
    row = teacher + 6 * learned + head * width * work.draft_vocab_size
    text = (
        f"2 x {work.target_parameters:,} + {work.rows_per_token:g} rows x (2 x {work.hidden_size:,} x "
        f"{work.vocab_size:,} + 6 x {learned:,} + {head} x {width:,} x {work.draft_vocab_size:,})"
        "; --plan-measure times them"
    )
    return target + work.rows_per_token * row, text


def _time(work: Workload, flops_per_second: float, measured: Measured | None) -> list[Line]:
    total = work.steps * work.tokens_per_step
    tokens = Line("tokens", total, "tokens", f"{work.steps:,} steps x {work.tokens_per_step:,.0f}")
    if measured is None:
        flops, text = flops_per_token(work)
        speed = work.ranks * flops_per_second / flops
        how = f"{work.ranks} x {flops_per_second:.3g} FLOP/s / {flops:.3g} FLOP"
        lines = [Line("work for a token", flops, "FLOP", text)]
    else:
        seconds = measured.capture_seconds + measured.learn_seconds
        speed = work.ranks * measured.tokens / seconds
        how = (
            f"{work.ranks} x {measured.tokens:,} tokens in {measured.capture_seconds:.2f} s of the target and "
            f"{measured.learn_seconds:.2f} s of the drafter, measured"
        )
        lines = []
    return [
        tokens, *lines, Line("speed", speed, "tokens/s", how),
        Line("time", total / speed, "s", f"{total:,.0f} tokens / {speed:,.0f} tokens/s; evaluations come on top"),
    ]  # fmt: skip


def _bytes(name: str, value: float, arithmetic: str) -> Line:
    return Line(name, value, "bytes", arithmetic)


# -------------------------------------------------------------------------------------------------------- of a real run


def workload_of(job: Job, process: Held | None = None) -> Workload:
    """The numbers of a run that is ready to begin; `process`: what else is in memory."""
    config, target, network = job.config, job.target, job.drafter.network
    assert config.steps is not None
    parameters = sum(p.numel() for p in network.parameters())
    tables, weights = job.drafter.tables or (), target_weights(target)
    half = config.mixed_precision != "no"
    largest = largest_pass(job)
    # A whole stream through its steps; a step is rarely quite full.
    per_epoch = int(job.order.lengths.sum()) / max(1, job.order.steps_of(1))
    return Workload(
        target_parameters=weights.parameters,
        target_itemsize=target.dtype.itemsize,
        drafter_parameters=parameters,
        saved_itemsize=job.drafter.saved_dtype.itemsize,
        hidden_size=target.hidden_size,
        states=len({*job.drafter.taps, target.num_layers}),
        vocab_size=target.vocab_size,
        draft_vocab_size=job.drafter.vocabulary.draft_size,
        kv_bytes=target.block_bytes // BLOCK_SIZE,
        kv_tokens=_tokens_of_target(largest),
        moments=moments(network, config),
        held=job.drafter.plan_memory(largest, half),
        data_tokens=int(job.order.lengths.sum()),
        steps=config.steps,
        tokens_per_step=min(per_epoch, config.tokens_per_step),
        pass_tokens=sum(largest),
        ranks=job.accelerator.num_processes,
        keep=config.keep,
        target_copied=weights.copied,
        rows_per_token=job.drafter.plan_rows_per_token(job.order.lengths.tolist()),
        feature_bytes=_feature_bytes(job),
        half=half,
        average=config.ema is not None,
        store_bytes=int((config.store_gb or 0) * 1e9),
        table_parameters=sum(p.numel() for p in {p for table in tables for p in table.parameters()}),
        head_width=tables[1].in_features if tables else None,
        process=process,
        start=job.drafter.plan_start(),
        gaps=GAPS if target.device.type == "cpu" and sys.platform == "linux" else 0.0,
    )


def largest_pass(job: Job) -> list[int]:
    """Lengths of the samples in the largest pass among the run's first steps, or of the longest sample alone."""
    from forerun.training.order import micro_batches

    most, lengths = job.config.micro_batch_tokens, job.order.lengths
    assert most is not None
    largest, place = [int(lengths.max())], 0
    for _ in range(STEPS_LOOKED_AT):
        indices, place = job.order.step(place)
        own = [int(lengths[i]) for i in indices]
        groups = [[own[i] for i in group] for group in micro_batches(own, most)]
        largest = max([largest, *groups], key=sum)
        if place >= len(lengths):
            break
    return largest


def _tokens_of_target(lengths: Sequence[int]) -> int:
    """Of the samples of a pass, those whose keys and values are there together."""
    from forerun.training.features.passes import MAX_ROWS, plan_passes

    return max(sum(chunk.end for chunk in one) for one in plan_passes(lengths, MAX_ROWS))


def process_of(job: Job, before: int) -> Held:
    """What this process takes beside weights: programs, libraries, what loading has left to be used again.

    Args:
        job: ready to begin.
        before: bytes it took before the target was loaded.
    """
    if job.target.device.type == "cuda":
        return CUDA_CONTEXT
    weights = target_weights(job.target).size
    weights += FP32 * sum(p.numel() for p in job.drafter.network.parameters())
    return Held("process", max(before, resident_memory() - weights), "Python, torch and libraries, measured now")


def _feature_bytes(job: Job) -> int:
    from forerun.training.features import estimate

    size = estimate(
        1, job.target.hidden_size, job.drafter.taps, job.config.store_dtype, job.drafter.needs_normalizer,
        num_layers=job.target.num_layers,
    )  # fmt: skip
    return size.bytes_per_token


def target_weights(target: Any) -> Weights:
    """Of a target's model; nothing for a table."""
    model = getattr(target, "model", None)
    return Weights(0, 0, 0) if model is None else weights_of(model)


def measure(job: Job, micro_batches: int = 3) -> Measured:
    """Times the target and the drafter on the first micro-batches of the run; nothing is learned or written."""
    from forerun.training.order import micro_batches as packed

    assert job.config.micro_batch_tokens is not None
    samples = [job.inputs.train[i] for i in job.order.step(0)[0]]
    groups = packed([len(s.token_ids) for s in samples], job.config.micro_batch_tokens)[:micro_batches]
    _timed(job, [samples[i] for i in groups[0]])  # warms up
    parts = [_timed(job, [samples[i] for i in group]) for group in groups]
    job.drafter.network.zero_grad(set_to_none=True)
    return Measured(*(sum(column) for column in zip(*parts, strict=True)))


def _timed(job: Job, samples: Sequence[Sample]) -> tuple[int, float, float]:
    """(tokens, seconds of the target, seconds of the drafter)."""
    from forerun.training.features import capture

    began = time.perf_counter()
    batch = capture(job.target, samples, job.drafter.taps, with_normalizer=job.drafter.needs_normalizer)
    _wait(job)
    captured = time.perf_counter()
    with job.accelerator.autocast():
        exercise = job.drafter.prepare(batch, torch.Generator().manual_seed(job.config.seed))
        losses = job.drafter.losses(batch, exercise, 0.0)
    losses.total.backward()  # type: ignore[no-untyped-call]
    _wait(job)
    return len(batch.tokens), captured - began, time.perf_counter() - captured


def _wait(job: Job) -> None:
    if job.target.device.type == "cuda":
        torch.cuda.synchronize()


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """FLOP/s of a product of two square matrices, the best of a few."""
    a = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
