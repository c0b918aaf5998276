"""Is scheduling ever slower here, are its confidences right, is it predicted, and is the text the same? On one model.

    python benchmarks/scheduling.py plan --target TARGET --dtype bfloat16 --threads 2 --drafter ngram \\
        --drafter runs/dspark/best --prompts prompts.jsonl --out results
    python benchmarks/scheduling.py run (the same)
    python benchmarks/scheduling.py judge --out results --page docs/benchmarks/scheduling.md

Every step is a command of forerun; `plan` prints them, and how long they take once costs are known. `run` runs those
that have not been run with the very same words; one that was stopped goes on where it was, as the commands themselves
do. `judge` says of each claim whether it holds, has failed or was not measured; several --out are judged together.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.bench.simulate.systems import system
from forerun.budget.costs import DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.profile import Profile
from forerun.budget.stored import write_profile
from forerun.errors import ForerunError

FOLDER = Path(__file__).parent
LEAST_TOGETHER, FULL = 8, 2
"""Requests of a run of `bench load`: at least so many, and so many times those that are decoded at once."""
EAGER, PER_ROW, PER_DRAFT = "eager", 0.1, 0.01
"""Folder of costs by which drafting pays and verifying everything does not always: a row and a call, in plain steps."""
COUPLED = 2
"""Pairs in which ids are compared in float32: texts, not times."""
CALIBRATED_TOGETHER = 8
"""Requests that `calibrate` decodes together."""
MISSING = 3
"""Exit code of `judge` where a claim was not measured."""
DONE = (0, 1, 3)
"""Exit codes of a command that came to its end; 1: a claim has failed, 3: it is not proven, which `judge` says too."""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except (ValueError, RuntimeError, ForerunError) as error:
        print(f"scheduling.py: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{plan,run,judge}")
    for name, does, words in (
        ("plan", plan, "print the commands, and how long they take"),
        ("run", run, "run what is missing"),
    ):
        one = commands.add_parser(name, help=words)
        _add_setting(one)
        one.set_defaults(command=does)
    judging = commands.add_parser("judge", help="say which claims hold; exit code 1 if one failed, 3 if one is missing")
    judging.add_argument("--out", type=Path, required=True, action="append", help="of `run`; repeat it")
    judging.add_argument("--page", type=Path, help="write it there too, as Markdown")
    judging.set_defaults(command=judge)
    return parser


def _add_setting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True)
    add("--dtype", default="bfloat16", help="(%(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="that will decode (%(default)s)")
    add("--drafter", required=True, action="append", help="as for `forerun generate`; repeat it")
    add("--wrong", help="folder of the dspark drafter that the always-wrong one is made of; of `embedded`: embedded")
    add("--prompts", help="JSONL; of loads some 64")
    some = "JSONL; 10,000 held-out rounds take some hundred of them (--prompts)"
    own = "DRAFTER=FILE: of this drafter, named as in --drafter. One that does not learn can have any"
    add("--calibration-prompts", action="append", default=[], help=f"{some}; repeat it. {own}")
    add("--out", type=Path, required=True, help="folder of everything")
    add("--only", type=_names, default=STEPS, metavar="LIST", help=f"of {','.join(STEPS)}")
    add("--concurrency", default="1,4,16,32", metavar="LIST", help="(%(default)s)")
    add("--fixed", default="1,2,4", metavar="LIST", help="K to compare with (%(default)s)")
    add("--pairs", type=int, default=16, help="half of them choose the best K, half compare with it (%(default)s)")
    add("--max-tokens", type=int, default=64, help="of an output (%(default)s)")
    add("--rounds", type=int, default=22_000, help="of a calibration, half of them held out (%(default)s)")
    add("--calibrated-tokens", type=int, default=128, help="of an output of a calibration (%(default)s)")
    add("--seconds", type=float, default=90, help="of a profile (%(default)s)")


def _names(text: str) -> tuple[str, ...]:
    strange = [name for name in text.split(",") if name not in STEPS]
    if strange:
        raise argparse.ArgumentTypeError(f"{strange[0]!r} is none of {', '.join(STEPS)}")
    return tuple(text.split(","))


STEPS = ("profile", "calibrate", "load", "wrong", "predict", "compare", "coupled", "verify")
"""In their order: costs and calibrations before what is decided by them."""


# --------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Step:
    """One command of forerun, and the file that is there when it is done."""

    kind: str
    name: str
    words: Sequence[str]
    result: str

    @property
    def command(self) -> str:
        return shlex.join(["forerun", *self.words])

    def is_done(self, out: Path) -> bool:
        """With these very words: another option is another measurement."""
        said = out / f"{self.name}.command"
        return (out / self.result).exists() and said.exists() and said.read_text(encoding="utf-8") == self.command


def steps(args: argparse.Namespace) -> list[Step]:
    """Those that were asked for."""
    return [step for step in _all_steps(args) if step.kind in args.only]


def _all_steps(args: argparse.Namespace) -> Iterator[Step]:
    out, most = args.out, max(map(int, args.concurrency.split(",")))
    wrong = _wrong(args)
    drafters, everyone = _drafters(args.drafter), _drafters([*args.drafter, *wrong])
    measured = ("--requests", str(most), "--max-num-seqs", str(most), "--seconds", f"{args.seconds:g}")
    own, prompts = _model(args), _prompts(args)
    yield Step("profile", "profile", ["profile", *own, *everyone, *measured, *_json(out, "profile")], "profile.json")
    for number, drafter in enumerate(args.drafter):
        name = f"calibrate-{number}"
        amount = ("--temperature", "0,1", "--rounds", str(args.rounds), "--max-tokens", str(args.calibrated_tokens))
        words = [
            "calibrate",
            *own,
            *_drafters([drafter]),
            *_prompts(args, _calibration_prompts(args, drafter)),
            *amount,
        ]
        yield Step("calibrate", name, [*words, "--rows", str(out / f"{name}.rows"), *_json(out, name)], f"{name}.json")
    mixed = ("--mixed",) if len(args.drafter) > 1 else ()
    yield _load(args, "load", [*drafters, *mixed], args.pairs, own)
    if wrong:
        yield _load(args, "wrong", [*_drafters(wrong), "--bar", "0.95"], args.pairs, own)
    costs, found = ("--profile", str(out / "profile.json")), ("--predict", str(out / "load.json"))
    yield Step("predict", "predict", ["simulate", *costs, *found, *_json(out, "predict")], "predict.json")
    shown = (*_decoded(args), "--pairs", str(args.pairs), "--concurrency", args.concurrency)
    folder = ("--out", str(out / "compare"))
    yield Step("compare", "compare", ["compare", *own, *drafters, *prompts, *shown, *folder], "compare/compare.json")
    exact = _model(args, dtype="float32")
    measure32 = ["profile", *exact, *drafters, *measured, *_json(out, "profile-float32")]
    yield Step("coupled", "profile-float32", measure32, "profile-float32.json")
    same = [*drafters, *mixed, "--verify-mode", "coupled", "--temperature", "0.8"]
    yield _load(args, "coupled", same, COUPLED, exact)
    # By its own costs a scheduler may find that nothing pays; a certificate of nothing is none.
    own = _model(args, costs=EAGER)
    certify = ["verify", *own, *drafters, *prompts, "--limit", "3", "--policy", "delayed"]
    yield Step("verify", "verify", [*certify, "--output", str(out / "verify")], "verify.json")


def _load(args: argparse.Namespace, name: str, more: Sequence[str], pairs: int, model: Sequence[str]) -> Step:
    varied = ("--concurrency", args.concurrency, "--fixed", args.fixed, "--pairs", str(pairs))
    words = ["bench", "load", *model, *more, *_prompts(args), *varied, *_decoded(args)]
    kept = ("--rows", str(args.out / f"{name}.rows"))
    return Step(name, name, [*words, *kept, *_json(args.out, name)], f"{name}.json")


def _model(args: argparse.Namespace, dtype: str | None = None, costs: str = "costs") -> list[str]:
    """Costs of its own folder: what is measured elsewhere meanwhile changes nothing here."""
    words = ["--target", args.target, "--dtype", dtype or args.dtype, "--threads", str(args.threads)]
    return [*words, "--calibration-cache", str(args.out / costs)]


def _decoded(args: argparse.Namespace) -> list[str]:
    return ["--max-tokens", str(args.max_tokens), "--ignore-eos"]


def _prompts(args: argparse.Namespace, others: str | None = None) -> list[str]:
    """Those of `--prompts`, unless a step has others; none: the package's own."""
    named = others or args.prompts
    return ["--prompts", named] if named else []


def _calibration_prompts(args: argparse.Namespace, drafter: str) -> str | None:
    """The last that names this drafter, else the last that names none."""
    parted = (("", "", one) if Path(one).is_file() else one.rpartition("=") for one in args.calibration_prompts)
    named = {name: file for name, _, file in parted}
    strange = sorted(named.keys() - {"", *args.drafter})
    if strange:
        raise ValueError(f"--calibration-prompts: --drafter names no {strange[0]!r}")
    return named.get(drafter, named.get(""))


def _drafters(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("--drafter", name)]


def _wrong(args: argparse.Namespace) -> list[str]:
    if args.wrong is None:
        return []
    model = {} if args.wrong == "embedded" else {"model": args.wrong}
    return [json.dumps({"method": "wrong:Wrong", **model})]


def _json(out: Path, name: str) -> list[str]:
    return ["--json", "--output", str(out / f"{name}.json")]


# ---------------------------------------------------------------------------------------------------------------- time


def seconds_of(step: Step, args: argparse.Namespace, profile: Profile) -> float | None:
    """How long it would take at the speed of plain decoding, prefill left out; None: it takes what it takes."""
    if step.kind == "profile" or step.name.startswith("profile"):
        return args.seconds * (len(args.drafter) + 1)
    if step.kind == "calibrate":
        rows = CALIBRATED_TOGETHER * (1 + max(max(cost.lengths) for cost in profile.drafts.values()))
        return 2 * args.rounds / CALIBRATED_TOGETHER * profile.verify(CALIBRATED_TOGETHER, rows)
    ways = {"load": 2 + len(args.fixed.split(",")), "compare": 3}
    ways |= dict.fromkeys(("wrong", "coupled"), ways["load"])
    if step.kind not in ways:
        return None
    subjects = 1 if step.kind == "wrong" else len(args.drafter) + ("--mixed" in step.words)
    runs = subjects * ways[step.kind] * (1 + (COUPLED if step.kind == "coupled" else args.pairs))
    return runs * sum(_run_seconds(int(n), args.max_tokens, profile) for n in args.concurrency.split(","))


def _run_seconds(together: int, tokens: int, profile: Profile) -> float:
    requests = max(LEAST_TOGETHER, FULL * together)
    return requests / together * tokens * profile.verify(together, together)


def _told(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{max(1, seconds / 60):.0f} min"


def plan(args: argparse.Namespace) -> int:
    """`scheduling.py plan`."""
    costs = args.out / "profile.json"
    profile = system(str(costs)).profile if costs.exists() else None
    for step in steps(args):
        took = None if profile is None else seconds_of(step, args, profile)
        about = "" if took is None else f", about {_told(took)} at the speed of plain decoding"
        state = "done" if step.is_done(args.out) else "to do"
        print(f"# {step.name}: {state}{about}\n{step.command}")
    if profile is None:
        print("# how long all of it takes is known when `run --only profile` has measured what a step costs")
    return 0


# ----------------------------------------------------------------------------------------------------------------- run


def run(args: argparse.Namespace) -> int:
    """`scheduling.py run`."""
    args.out.mkdir(parents=True, exist_ok=True)
    for step in steps(args):
        if step.is_done(args.out):
            print(f"{step.name}: done before", file=sys.stderr)
            continue
        said = args.out / f"{step.name}.command"
        (args.out / step.result).unlink(missing_ok=True)  # of other words: `judge` must not take it for these
        said.write_text(step.command, encoding="utf-8")
        if step.kind == "verify":
            write_eager(args.out)
        print(step.command, file=sys.stderr)
        code = forerun(step.words)
        if code not in DONE or not (args.out / step.result).exists():
            raise RuntimeError(f"{step.name} ended with exit code {code}; the same command goes on from here")
    return 0


def write_eager(out: Path) -> None:
    """Costs for the certificate, under the key of those that were measured."""
    profile = system(str(out / "profile.json")).profile
    step = profile.verify(1, 1)
    verify = VerifyCost(CostCurve.measured({n: step * (1 + PER_ROW * (n - 1)) for n in (1, 2, 512)}))
    draft = DraftCost.measured({k: {1: PER_DRAFT * step} for k in (1, 16)})
    write_profile(
        replace(profile, verify=verify, drafts=dict.fromkeys(profile.drafts, draft)), out / EAGER, merge=False
    )


def forerun(words: Sequence[str]) -> int:
    """Runs a command of forerun in a process of its own, with `wrong` beside it."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "forerun", *words], env=os.environ | {"PYTHONPATH": path}, check=False)
    return done.returncode


# --------------------------------------------------------------------------------------------------------------- judge


def judge(args: argparse.Namespace) -> int:
    """`scheduling.py judge`."""
    from scheduling_judge import judged, markdown

    claims = judged(args.out)
    for claim in claims:
        print(f"{claim.state:11} {claim.words}")
        for line in claim.details:
            print(f"            {line}")
    if args.page is not None:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(markdown(claims, args.out), encoding="utf-8")
    states = {claim.state for claim in claims}
    return 1 if "FAILED" in states else MISSING if "not measured" in states else 0


if __name__ == "__main__":
    sys.exit(main())
