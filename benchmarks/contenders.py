"""What is compared: configurations, and the two engines that run them on the same token ids in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from forerun.target.dtypes import dtype_named

if TYPE_CHECKING:
    import forerun

LENGTHS = (1, 2, 3, 4, 6)
"""K of the runs at batch 1."""


@dataclass(frozen=True)
class Config:
    """One way to decode a prompt."""

    engine: Literal["forerun", "transformers"]
    method: str
    """`plain` or a kind of drafter; `+lookup` behind it: prompt lookup is mixed into its laws. In transformers' words:
    small is `assistant_model`, ngram is `prompt_lookup_num_tokens`."""
    k: int | None
    """Draft tokens per round; None: what transformers does when only `assistant_model` is given."""
    temperature: float
    batch: int = 1

    @property
    def name(self) -> str:
        k = "default" if self.k is None else self.k
        return f"{self.engine}-{self.method}-k{k}-t{self.temperature:g}-b{self.batch}"


def batch_one(temperatures: Sequence[float]) -> list[Config]:
    """Every configuration at batch 1."""
    out = []
    for temperature in temperatures:
        for engine in ("forerun", "transformers"):
            out.append(Config(engine, "plain", 0, temperature))
            out += [Config(engine, method, k, temperature) for method in ("small", "ngram") for k in LENGTHS]
        out.append(Config("transformers", "small", None, temperature))
    return out


def batched(best: Sequence[Config], batch: int) -> list[Config]:
    """Plain decoding of both engines and our best drafted configurations, several prompts at a time.

    transformers refuses assisted decoding of more than one prompt, so there is nothing to compare with there.
    """
    temperatures = sorted({config.temperature for config in best})
    plain = [Config(engine, "plain", 0, t, batch) for t in temperatures for engine in ("forerun", "transformers")]
    return plain + [Config("forerun", config.method, config.k, config.temperature, batch) for config in best]


@dataclass(slots=True)
class Job:
    """Prompts to complete together."""

    prompts: list[list[int]]
    max_tokens: int
    seed: int
    margins: bool = False
    """Also record how far the best token led at every position (forerun only)."""


@dataclass(slots=True)
class Run:
    """What came of a job."""

    seconds: float
    cpu_seconds: float
    ids: list[list[int]]
    """Generated tokens per prompt, the end-of-sequence token included."""
    arrivals: list[float]
    """Seconds from the start at which tokens of the first prompt arrived."""
    target_passes: int
    """Forward passes of the target, the prompt's included."""
    draft_passes: int | None
    """Forward passes of the drafting model where they were counted (transformers)."""
    counters: dict[str, Any] | None = None
    """Sums of forerun's decoding counters over the prompts."""
    margins: list[list[float]] = field(default_factory=list)


class Engine(Protocol):
    """One of the two engines."""

    def run(self, config: Config, job: Job) -> Run: ...


class Forerun:
    """forerun through its public engine: one target with both drafters loaded, chosen per call."""

    def __init__(self, target: str, draft: str, dtype: str, threads: int):
        import forerun

        fixed = {"policy": "fixed"}  # K is what a row says, whatever has been measured on this machine
        drafters = [{"method": "small", "model": draft} | fixed, {"method": "ngram"} | fixed]
        self._engine = forerun.Engine.load(
            target,
            drafters,
            dtype=dtype,
            threads=threads,
            num_speculative_tokens=max(LENGTHS),
            enable_prefix_caching=False,  # every run computes its whole prompt
        )

    def run(self, config: Config, job: Job) -> Run:
        return decoded(self._engine, config, job)


class Alone:
    """forerun with one drafter at a time: neither plain decoding nor a drafter pays for what another one reads.

    Args:
        target: folder of the target, or an embedded name.
        drafters: name in a row -> what `--speculative-config` takes.
        longest: the largest K that will be asked for; K is what a row says, the scheduler has no part in it.
        dtype: of target and drafters.
        threads: of torch.
    """

    def __init__(self, target: str, drafters: Mapping[str, Mapping[str, Any]], longest: int, dtype: str, threads: int):
        from forerun.engine import EngineOptions
        from forerun.engine.load import drafting_up_to, load_drafters
        from forerun.target.load import load_target

        self.target = load_target(target, dtype=dtype, threads=threads)  # type: ignore[arg-type]
        self._loaded = {}
        for name, one in drafters.items():
            loaded = load_drafters({"policy": "fixed", **one}, self.target, EngineOptions())
            [self._loaded[name]] = drafting_up_to(loaded, longest)

    def run(self, config: Config, job: Job) -> Run:
        from forerun import Engine
        from forerun.engine import EngineOptions

        drafters = [] if config.method == "plain" else [self._loaded[config.method]]
        options = EngineOptions(max_num_seqs=len(job.prompts), kv_cache_memory_bytes=self._storage(drafters, job))
        with Engine(self.target, drafters, options) as engine:
            return decoded(engine, config, job)

    def _storage(self, drafters: Sequence[Any], job: Job) -> int:
        """Bytes of KV for these prompts and their answers, a block each to spare for what is drafted."""
        from forerun.target.blocks import blocks_for

        block = self.target.block_bytes + sum(entry.drafter.block_bytes for entry in drafters)
        return block * sum(blocks_for(len(prompt) + job.max_tokens + SPARE) for prompt in job.prompts)


SPARE = 64
"""Rows beyond what a request may commit: drafts of its last round."""


def decoded(engine: forerun.Engine, config: Config, job: Job) -> Run:
    """One job through forerun, by its stream. RuntimeError if the drafter raised: its rounds would be plain ones."""
    from forerun import Sampling

    sampling = Sampling(
        temperature=config.temperature,
        max_tokens=job.max_tokens,
        seed=job.seed,
        logprobs=2 if job.margins else None,
    )
    kind = config.method.partition("+")[0]
    speculative = False if config.method == "plain" else {"method": kind, "max_draft": config.k}
    clock = _Clock()
    completions: dict[int, Any] = {}
    for chunk in engine.stream(job.prompts, sampling, speculative=speculative):
        if chunk.prompt_index == 0 and chunk.token_ids:
            clock.tick()
        if chunk.completion is not None:
            completions[chunk.prompt_index] = chunk.completion
    run = clock.stop()
    done = [completions[i] for i in range(len(job.prompts))]
    run.ids = [completion.token_ids for completion in done]
    run.margins = [_margins(completion.logprobs) for completion in done] if job.margins else []
    run.counters = _summed([completion.stats for completion in done])
    run.target_passes = max(completion.stats.target_steps for completion in done) + 1
    if run.counters["drafter_faults"]:
        raise RuntimeError(f"the drafter of {config.name} raised in {run.counters['drafter_faults']} rounds")
    return run


def _summed(stats: Sequence[Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from forerun.engine.stats import total

    return asdict(total(stats))


def _margins(logprobs: Sequence[Any]) -> list[float]:
    """Best minus second-best logit at each position: log-probabilities differ from logits by one constant a row."""
    return [one.top[0][1] - one.top[1][1] for one in logprobs]


class Transformers:
    """transformers' own `generate` on the same converted weights, with its defaults except where said. Without a
    `draft` there is no assistant, hence no `small`."""

    def __init__(self, target: str, draft: str | None, dtype: str, threads: int):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        load = AutoModelForCausalLM.from_pretrained
        self._target = load(target, dtype=dtype_named(dtype)).eval()
        self._assistant = None if draft is None else load(draft, dtype=dtype_named(dtype)).eval()
        self._passes = {"target": 0, "draft": 0}
        for name, model in (("target", self._target), ("draft", self._assistant)):
            if model is not None:
                model.register_forward_pre_hook(self._counter(name))

    def _counter(self, name: str) -> Any:
        def count(*_: Any) -> None:
            self._passes[name] += 1

        return count

    def run(self, config: Config, job: Job) -> Run:
        torch.manual_seed(job.seed)
        self._passes.update(target=0, draft=0)
        width = max(map(len, job.prompts))
        end = self._target.generation_config.eos_token_id
        fill = end[0] if isinstance(end, list) else end
        left = [[fill] * (width - len(prompt)) + prompt for prompt in job.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in job.prompts]
        clock = _Clock()
        output = self._target.generate(
            torch.tensor(left),
            attention_mask=torch.tensor(mask),
            max_new_tokens=job.max_tokens,
            pad_token_id=fill,
            streamer=_Arrivals(clock),
            **_law(config.temperature),
            **self._drafting(config),
        )
        run = clock.stop()
        run.ids = [_until_end(row[width:].tolist(), end) for row in output]
        run.target_passes, run.draft_passes = self._passes["target"], self._passes["draft"]
        return run

    def _drafting(self, config: Config) -> dict[str, Any]:
        if config.method == "plain":
            return {}
        if config.method == "ngram":
            return {"prompt_lookup_num_tokens": config.k}
        assert self._assistant is not None, f"{config.name} needs a draft model"
        own = self._assistant.generation_config
        # With a K of ours: exactly K drafts a round. None leaves transformers' own choice, up to 20 drafts, ended where
        # the assistant's confidence falls below 0.4.
        own.num_assistant_tokens = config.k
        own.num_assistant_tokens_schedule = None if config.k is None else "constant"
        own.assistant_confidence_threshold = None if config.k is None else 0.0
        return {"assistant_model": self._assistant}


def _law(temperature: float) -> dict[str, Any]:
    """The sampling options of `generate` for the model's own law: its default top_k of 50 would be another one."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def _until_end(ids: list[int], end: int | list[int]) -> list[int]:
    """Up to and with the first end-of-sequence token: what follows in a batch is padding."""
    ends = set(end if isinstance(end, list) else [end])
    cut = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:cut]


class _Arrivals:
    """The streamer `generate` talks to: it gets the prompt first, then the tokens of each step."""

    def __init__(self, clock: _Clock):
        self._clock = clock
        self._saw_prompt = False

    def put(self, _value: Any) -> None:
        if self._saw_prompt:
            self._clock.tick()
        self._saw_prompt = True

    def end(self) -> None:
        pass


class _Clock:
    """Wall and processor time of one run."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._arrivals: list[float] = []

    def tick(self) -> None:
        self._arrivals.append(round(time.perf_counter() - self._wall, 4))

    def stop(self) -> Run:
        seconds = time.perf_counter() - self._wall
        return Run(seconds, time.process_time() - self._cpu, [], self._arrivals, 0, None)


class Contenders:
    """Engines by name, each made when it is first needed and warmed up before it is first measured."""

    def __init__(self, makers: Mapping[str, Callable[[], Engine]]):
        self._makers = makers
        self._engines: dict[str, Engine] = {}
        self._warm: set[tuple[str, str, bool]] = set()

    def run(self, config: Config, job: Job) -> Run:
        if config.engine not in self._engines:
            self._engines[config.engine] = self._makers[config.engine]()
        engine = self._engines[config.engine]
        kind = (config.engine, config.method, config.batch > 1)
        if kind not in self._warm:
            backwards = [prompt[::-1] for prompt in job.prompts]  # other text: nothing measured later is seen here
            engine.run(config, Job(backwards, 8, 0))
            self._warm.add(kind)
        return engine.run(config, job)


def pair(target: Path, draft: Path, dtype: str, threads: int) -> Contenders:
    """Both engines with the same two models."""
    models = (str(target), str(draft), dtype, threads)
    return Contenders({"forerun": lambda: Forerun(*models), "transformers": lambda: Transformers(*models)})


def model_folder(path: Path, dtype: str) -> Path:
    """The safetensors folder of a model: both engines read the same one, converted from the GGUF file if it is one."""
    if path.is_dir():
        return path
    from forerun.target.gguf import converted

    return converted(path, dtype_named(dtype))
