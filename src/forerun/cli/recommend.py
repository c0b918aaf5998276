"""`forerun recommend`: what should be run here, and is it worth it?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.screen import fitted, text_of
from forerun.cli.console import Output, as_json, notes, progress, screen, waiting
from forerun.cli.load import load_drafters_of, load_target_of, with_drafters
from forerun.cli.measuring import TargetArgument, fixed, measurable, measured
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, PromptFlags, flags
from forerun.cli.prompts import named_prompts, prompt_ids
from forerun.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.bench.profiling.profiler import ProfileOptions
    from forerun.bench.recommending.acceptance import Acceptance, Shown
    from forerun.bench.recommending.mixture import Mixed, Part
    from forerun.bench.recommending.recommendation import Candidate, Choice
    from forerun.bench.recommending.report import Recommendation
    from forerun.budget.costs import Costs
    from forerun.budget.profile import Profile
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine
    from forerun.engine.propose import LoadedDrafter
    from forerun.sampling import Sampling
    from forerun.target.hf import HFTarget

PROMPTS = 8
"""Of the package's own, where none are named."""
SECONDS = 60.0
"""To measure costs that are not known yet, for each drafter."""


@dataclass(frozen=True, kw_only=True)
class RecommendFlags:
    """The load, and how acceptance is measured."""

    concurrency: Annotated[str, typer.Option(metavar="LIST", help="Requests decoded together: 1,4,16.")] = "1"
    context: Annotated[
        int | None, typer.Option(help="Tokens before a request. Default: as in the prompts measured.")
    ] = None
    temperature: Annotated[float, typer.Option(help="Of the requests.")] = 0.0
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 64
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0
    seconds: Annotated[float, typer.Option(help="To measure costs that were not measured yet.")] = SECONDS
    cards: Annotated[
        bool,
        typer.Option("--cards", help="Believe the cards of trained drafters instead of decoding with them."),
    ] = False

    def loads(self) -> list[int]:
        """OptionError: not numbers of requests."""
        try:
            values = list(dict.fromkeys(int(item) for item in self.concurrency.split(",")))
        except ValueError:
            raise OptionError("--concurrency", f"must be numbers like 1,4,16; got {self.concurrency!r}") from None
        if any(value < 1 for value in values):
            raise OptionError("--concurrency", f"must all be at least 1, got {self.concurrency!r}")
        return values

    def sampling(self) -> Sampling:
        from forerun.sampling import Sampling

        if self.max_tokens < 2:
            raise OptionError("max_tokens", f"must be at least 2, got {self.max_tokens}")
        if self.context is not None and self.context < 0:
            raise OptionError("context", f"must be at least 0, got {self.context}")
        return Sampling(temperature=self.temperature, max_tokens=self.max_tokens, ignore_eos=True, seed=self.seed)

    def options(self) -> ProfileOptions:
        from forerun.bench.profiling.profiler import ProfileOptions

        return ProfileOptions(seconds=self.seconds, temperature=self.temperature)


@flags
def recommend(
    engine: EngineFlags,
    prompts: PromptFlags,
    run: RecommendFlags,
    model: TargetArgument = None,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> None:
    """The speed-up to expect of each drafter at a load, from acceptance measured on prompts and costs measured on this
    machine (measured now where `forerun profile` has not), and the K and the command line that follow. Of several
    drafters also two in turn: one that does not always propose where it does, another where it does not.

    forerun recommend embedded --drafter ngram,small --concurrency 1,8
    """
    destination = Output(output)
    loads, sampling = run.loads(), run.sampling()
    run.options()
    ready = with_drafters(measurable(engine, model), "comparing")
    configs = [fixed(config) for config in ready.drafters() if config.name != "vanilla"]
    if not configs:
        raise OptionError("--drafter", "vanilla is what every drafter is compared with; name another one")
    named = named_prompts(prompts)
    with waiting("loading"):
        loaded = load_target_of(ready)
    _check_costs(ready, loaded, configs)
    ids = prompt_ids(named, loaded.tokenizer, prompts.limit or PROMPTS)
    singles = [_choice(ready, loaded, config, ids, run) for config in configs]
    choices: list[Choice] = [*singles, *_mixtures(ready, loaded, configs, singles, ids, run)]
    most = max(*loads, ready.max_num_seqs or 0, 64)
    context = run.context if run.context is not None else sum(map(len, ids)) // len(ids) + run.max_tokens // 2
    _report(_recommendation(choices, loads, context, most, loaded.window), loaded, sampling, destination, json_)


def _recommendation(
    choices: Sequence[Choice], loads: Sequence[int], context: int, most: int, window: int
) -> Recommendation:
    from forerun.bench.recommending.report import Recommendation, Setting

    return Recommendation.of(choices, Setting(loads, context, most, window))


def _choice(
    ready: EngineFlags, target: HFTarget, config: SpeculativeConfig, prompts: list[list[int]], run: RecommendFlags
) -> Candidate:
    """One drafter, loaded alone beside the target: two of a kind can be compared."""
    from forerun.bench.recommending.recommendation import Candidate

    with waiting(f"loading {config.name}"):
        engine = _engine(ready, target, [config])
    with engine:
        costs = _costs(engine, ready, prompts, run.options())
        found = _acceptance(engine, prompts, run)
    return Candidate(_label(config), loading_flags(ready, config), costs, found)


def _acceptance(engine: Engine, prompts: list[list[int]], run: RecommendFlags) -> Acceptance:
    """Of an engine's only drafter: by its card if that is wanted and there, else by decoding."""
    from forerun.bench.recommending.acceptance import shown

    [entry] = engine.core.loaded
    carded = _carded(entry, run) if run.cards else None
    if carded is not None:
        return carded
    if run.cards:
        notes().print(f"{entry.name} has no card for temperature {run.temperature:g}: decoding with it")
    with progress(f"decoding with {entry.name}", len(prompts) * run.max_tokens) as advance:
        return shown(engine, entry, prompts, run.sampling(), advance)


def _carded(entry: LoadedDrafter, run: RecommendFlags) -> Acceptance | None:
    """What the drafter's card tells of temperatures like this one, up to its K; None: nothing."""
    from forerun.bench.profiling.profiler import longest_draft
    from forerun.bench.recommending.acceptance import Carded
    from forerun.budget.calibration import temperature_bucket
    from forerun.drafters.card import acceptances

    folder = getattr(entry.drafter, "folder", None) or entry.config.model
    if folder is None:
        return None
    bucket = temperature_bucket(run.temperature)
    told = {t: rates for t, rates in acceptances(Path(folder)).items() if temperature_bucket(t) == bucket}
    if not told:
        return None
    nearest = min(told, key=lambda t: abs(t - run.temperature))
    return Carded(told[nearest][: longest_draft(entry)])


def _mixtures(
    ready: EngineFlags, target: HFTarget, configs: Sequence[SpeculativeConfig], singles: Sequence[Candidate],
    prompts: list[list[int]], run: RecommendFlags,
) -> list[Mixed]:  # fmt: skip
    """A look-up that does not always propose before each drafter of another kind; what each then gets right is decoded
    anew. What is only known by its card is left out. (A model proposes whenever there is room: at the end of a short
    output there is none.)"""
    from forerun.bench.recommending.acceptance import Shown
    from forerun.budget.selection import ALWAYS
    from forerun.drafters import drafter_class

    both = [(c, s) for c, s in zip(configs, singles, strict=True) if isinstance(s.shown, Shown)]
    return [
        _mixed(ready, target, (first, other), (costs, its), prompts, run)
        for first, costs in both
        for other, its in both
        if drafter_class(first.name).deterministic and 0 < costs.shown.match() < ALWAYS and first.name != other.name
    ]


def _mixed(
    ready: EngineFlags, target: HFTarget, pair: tuple[SpeculativeConfig, SpeculativeConfig],
    singles: tuple[Candidate, Candidate], prompts: list[list[int]], run: RecommendFlags,
) -> Mixed:  # fmt: skip
    """Two drafters in one engine, the second asked where the first has nothing."""
    from forerun.bench.recommending.acceptance import shown_in_turn
    from forerun.bench.recommending.mixture import Mixed

    what = f"decoding with {' and '.join(config.name for config in pair)}"
    with _engine(ready, target, pair) as engine, progress(what, len(prompts) * run.max_tokens) as advance:
        found = shown_in_turn(engine, prompts, run.sampling(), advance)
    first, other = (_part(c, s, one) for c, s, one in zip(pair, singles, found, strict=True))
    return Mixed(f"{first.name}, else {other.name}", shlex.join(target_flags(ready)), first, other)


def _part(config: SpeculativeConfig, single: Candidate, found: Shown) -> Part:
    from forerun.bench.recommending.mixture import Part

    return Part(single.label, single.costs, found, _given(config))


def _engine(ready: EngineFlags, target: HFTarget, configs: Sequence[SpeculativeConfig]) -> Engine:
    from forerun.engine import Engine, EngineOptions
    from forerun.engine.tuning import scheduling_of

    options = EngineOptions.of(ready.options())
    loaded = load_drafters_of(ready, target, configs)
    return Engine(target, loaded, options, scheduling=scheduling_of(target, loaded, options, look_up=False))


def _check_costs(ready: EngineFlags, target: HFTarget, configs: Sequence[SpeculativeConfig]) -> None:
    """OptionError if costs must be measured and could not be kept: told before the first drafter decodes."""
    from forerun.budget.stored import check_kept, profile_path, profiles_folder, read_profile
    from forerun.drafters import drafter_class
    from forerun.engine.profile_key import engine_key

    folder = profiles_folder(ready.calibration_cache)
    if folder is None:
        return
    key = engine_key(target)
    found = read_profile(key, folder)
    if not all(_known(found, drafter_class(config.name).name, config) for config in configs):
        check_kept(profile_path(key, folder))


def _known(profile: Profile | None, drafter: str, config: SpeculativeConfig) -> bool:
    """Whether the costs of this very drafter are in a profile."""
    from forerun.engine.profile_key import model_of

    if profile is None or drafter not in profile.drafts:
        return False
    return profile.models.get(drafter, "") == model_of(config)


def _costs(engine: Engine, ready: EngineFlags, prompts: list[list[int]], options: ProfileOptions) -> Costs:
    """As stored for this machine; measured and stored where that lacks the drafter."""
    from forerun.budget.stored import profiles_folder, read_profile, write_profile
    from forerun.engine.profile_key import engine_key

    [entry] = engine.core.loaded
    folder = profiles_folder(ready.calibration_cache)
    known = None if folder is None else read_profile(engine_key(engine.target), folder)
    if known is not None and _known(known, entry.name, entry.config):
        return known.costs(entry.name)
    notes().print(f"the costs of {entry.name} are not known on this machine: measuring")
    profile = measured(engine, prompts, options, None if known is None else known.verify).profile
    if folder is not None:
        write_profile(profile, folder)
    return profile.costs(entry.name)


def _label(config: SpeculativeConfig) -> str:
    name = config.labelled(config.name)
    return name if config.model is None else f"{name} ({config.model})"


def loading_flags(ready: EngineFlags, config: SpeculativeConfig) -> str:
    """Flags of `forerun generate` that load this pair as it was loaded here."""
    words, given = target_flags(ready), _given(config)
    if set(given) == {"method"} or set(given) == {"model"}:
        return shlex.join([*words, "--drafter", *map(str, given.values())])
    return shlex.join([*words, "--speculative-config", json.dumps(given)])


def target_flags(ready: EngineFlags) -> list[str]:
    """Flags that load the target as it was loaded here."""
    words = ["--target", ready.source]
    for name in ("dtype", "device", "threads"):
        value = getattr(ready, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def _given(config: SpeculativeConfig) -> dict[str, Any]:
    """Keys that load a drafter."""
    return config.model_dump(exclude_unset=True, exclude={"policy", "num_speculative_tokens"})


# ------------------------------------------------------------------------------------------------------------- showing


def _report(
    recommendation: Recommendation, target: HFTarget, sampling: Sampling, destination: Output, json_: bool
) -> None:
    from forerun.bench.machine import versions
    from forerun.bench.provenance import hardware, model

    made = {"target": model(target), "hardware": hardware(target.device), "versions": versions()}
    options = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "seed": sampling.seed}
    if json_:
        destination.write(as_json({**recommendation.as_dict(), "options": options, **made}))
    elif destination.path is not None:
        destination.write(text_of(lambda console: _show(recommendation, made, options, console)))
    else:
        _show(recommendation, made, options, fitted(screen()))


def _show(recommendation: Recommendation, made: dict[str, Any], options: dict[str, Any], console: Console) -> None:
    from forerun.bench.recommending.report import FORMULA, by_k, sentences, table

    console.print(table(recommendation))
    console.print()
    console.print(by_k(recommendation))
    console.print()
    for line in sentences(recommendation):
        console.print(line, markup=False)
    console.print()
    target, hardware = made["target"], made["hardware"]
    console.print(
        f"{target['name']}, {target['dtype']}, on {hardware['name']} ({hardware['device']}, {hardware['threads']} "
        f"threads); temperature {options['temperature']:g}, behind {recommendation.setting.context} tokens",
        style="dim",
        markup=False,
    )
    for line in (line for choice in recommendation.choices for line in choice.remarks()):
        console.print(line, style="dim", markup=False)
    console.print(FORMULA, style="dim", markup=False)
