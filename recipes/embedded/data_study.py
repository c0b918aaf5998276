"""Whose answers a drafter should learn from, and how many: DSpark on the embedded target, judged by real decoding.

    python recipes/embedded/data_study.py run --work DIR/study [--answers DIR/answers.jsonl]
    python recipes/embedded/data_study.py report --work DIR/study --page docs/benchmarks/data_study.md

Two questions about the same prompts. Does it matter that the target itself wrote the answers? One drafter learns those,
another what the source text has behind the prompt, cut to as many tokens. And what do more samples bring? Further
drafters learn from a part of the target's answers. Every run has the same --minutes of processor time and the same
steps, so fewer samples are seen more often; all are judged on prompts that none of them has met.

The answers of drafters.py can be given, also while they are still being made; without them the ones needed are made
here, which takes as long again as two of the runs. Run again, it goes on where it stopped. The defaults are 25 minutes
of one thread beyond the answers. `report` makes table and JSON of the runs that are finished, and of nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # what the recipes share

from ablations import BASE, SHARED, found
from commands import TRIAL, Command, flags, pace_of, run_or_exit, setting, whole_lines

HELD_OUT = 64
"""Prompts that every run is judged on."""
SAMPLING = ("--temperature", 0.8, "--seed", 1, "--max-tokens", 200)
LONGEST = 4000
"""Characters of the source text that are looked at behind a prompt: more than the longest answer has."""


@dataclass(frozen=True)
class Arm:
    """What one drafter learns from."""

    writer: str
    """target, or source: the text the prompt was cut from."""
    samples: int

    @property
    def name(self) -> str:
        return f"{self.writer}-{self.samples}"


def arms(samples: Sequence[int]) -> list[Arm]:
    """The target's answers in every number, the source text's in the largest."""
    return [*(Arm("target", number) for number in sorted(samples)), Arm("source", max(samples))]


# ---------------------------------------------------------------------------------------------------------------- data


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Whole or not at all."""
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    new.replace(file)


def lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as opened:
        yield from map(json.loads, opened)


def texts(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """id -> prompt and the source text behind it, in the order of drafter_prompts.py; kept in work/texts.jsonl."""
    file: Path = options.work / "texts.jsonl"
    if not file.exists():
        from drafter_prompts import every_prompt
        from tokenizer import load_tokenizer

        chooser = random.Random(7)
        prompts = every_prompt(load_tokenizer(options.tokenizer), chooser)
        ids = sorted(prompts)
        chooser.shuffle(ids)
        write_lines(file, [{"id": i, "prompt": prompts[i][0], "text": prompts[i][1][:LONGEST]} for i in ids])
    return {row["id"]: row for row in lines(file)}


def answered(options: argparse.Namespace, known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The target's answers to held-out and training prompts, as many as are needed, decided once for a work folder.

    ValueError: there are fewer.
    """
    file, need = options.work / "answers.jsonl", HELD_OUT + max(options.samples)
    if options.answers is not None and not file.exists():
        whole_lines(options.answers, file)
    if options.answers is None:
        prompts = options.work / "prompts.jsonl"
        if not prompts.exists():
            usable = [row for row in known.values() if row["text"].strip()]
            write_lines(prompts, [{"id": row["id"], "prompt": row["prompt"]} for row in usable[:need]])
        words = ("prompts.jsonl", "--target", options.target, "--out", "answers.jsonl", "--max-num-seqs", 64)
        run_or_exit(Command.forerun("data", "regenerate", *words, "--threads", 1, *SAMPLING, cwd=options.work))
    rows = [row for row in lines(file) if row["id"] in known and known[row["id"]]["text"].strip()]
    if len(rows) < need:
        raise ValueError(f"--answers: {len(rows)} can be used, {need} are needed; wait for more, or lower --samples")
    return rows[:need]


def samples_of(arm: Arm, answers: Sequence[dict[str, Any]], known: dict[str, dict[str, Any]], encoding: Any) -> Any:
    """Records for `forerun data prepare`."""
    chosen = answers[HELD_OUT : HELD_OUT + arm.samples]
    if arm.writer == "target":
        return list(chosen)
    return [
        {"id": row["id"], "prompt": row["prompt"], "completion": cut(known[row["id"]]["text"], row, encoding)}
        for row in chosen
    ]


def cut(text: str, answer: dict[str, Any], encoding: Any) -> str:
    """The beginning of a text that has as many tokens as the target's answer."""
    return str(encoding.decode(encoding.encode(text, add_special_tokens=False)[: len(answer["token_ids"][0])]))


def prepare(options: argparse.Namespace) -> None:
    """The arms' data in work/data/NAME, and what all are judged on in work/data/held_out."""
    from tokenizer import load_tokenizer

    wanted = [arm for arm in arms(options.samples) if not _is_prepared(options, arm.name)]
    if not wanted and _is_prepared(options, "held_out"):
        return
    known = texts(options)
    answers, encoding = answered(options, known), load_tokenizer(options.tokenizer)
    records = {arm.name: samples_of(arm, answers, known, encoding) for arm in wanted}
    for name, rows in {**records, "held_out": answers[:HELD_OUT]}.items():
        if _is_prepared(options, name):
            continue
        write_lines(options.work / f"{name}.jsonl", rows)
        words = (f"{name}.jsonl", "--target", options.target, "--out", Path("data") / name)
        (options.work / "data").mkdir(exist_ok=True)
        run_or_exit(Command.forerun("data", "prepare", *words, cwd=options.work))


def _is_prepared(options: argparse.Namespace, name: str) -> bool:
    return (options.work / "data" / name / "manifest.json").is_file()


# ------------------------------------------------------------------------------------------------------------ training


def run(options: argparse.Namespace) -> None:
    """`data_study.py run`."""
    options.work.mkdir(parents=True, exist_ok=True)
    asked = {"minutes": options.minutes, "samples": sorted(options.samples), "target": options.target,
             "set": sorted(options.set)}  # fmt: skip
    file: Path = options.work / "plan.json"
    plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"asked": asked}
    if plan["asked"] != asked:
        raise ValueError(f"--work: {options.work} was planned with {plan['asked']}; name another folder")
    prepare(options)
    if not file.exists():
        longest = arms(options.samples)[-2]
        run_or_exit(_training(longest, Path("trial"), TRIAL, options))
        budget, pace = 60 * options.minutes, pace_of(options.work / "trial")
        plan |= {"cpu_seconds": budget, "step": pace.step, "steps": pace.steps(budget, 1), "machine": _machine()}
        file.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    length = {
        "steps": plan["steps"], "eval-every": plan["steps"], "save-every": max(1, plan["steps"] // 4), "keep": 1,
        "cpu-seconds": f"{plan['cpu_seconds']:g}",
    }  # fmt: skip
    waiting = [arm for arm in arms(options.samples) if found(options.work / "runs" / arm.name) is None]
    commands = [_training(arm, Path("runs") / arm.name, length, options) for arm in waiting]
    run_or_exit(*commands, at_once=options.jobs)
    print(table(results(options.work)))


def _training(arm: Arm, out: Path, length: dict[str, object], options: argparse.Namespace) -> Command:
    settings = SHARED | BASE | {"eval-prompts": HELD_OUT} | dict(map(setting, options.set)) | length
    data = ("--data", Path("data") / arm.name, "--held-out", Path("data") / "held_out")
    words = ("--target", options.target, *data, "--out", out, "--threads", 1, *flags(settings))
    log = options.work / "logs" / f"{out.name}.log"
    return Command.forerun("train", "dspark", *words, cwd=options.work, log=log)


def _machine() -> dict[str, Any]:
    from forerun.bench import machine
    from forerun.engine.profile_key import cpu_name

    return {"cpu": cpu_name(), "threads": 1, "versions": machine.versions()}


# -------------------------------------------------------------------------------------------------------------- result


def results(work: Path) -> dict[str, Any]:
    """Everything the page says, as data. ValueError: no run is finished."""
    plan = json.loads((work / "plan.json").read_text(encoding="utf-8")) if (work / "plan.json").exists() else {}
    rows = []
    for arm in arms(plan["asked"]["samples"]) if plan else ():
        row = found(work / "runs" / arm.name)
        if row is not None:
            counts = json.loads((work / "data" / arm.name / "manifest.json").read_text(encoding="utf-8"))["counts"]
            rows.append({"answers": arm.writer, "samples": arm.samples, "data": counts, **row})
    if not rows:
        raise ValueError(f"--work: no run in {work} is finished; begin with `data_study.py run`")
    return {"plan": plan, "rows": rows}


def length_at(row: dict[str, Any], temperature: float) -> float | None:
    """Mean accepted length of real decoding."""
    known = {one["temperature"]: one.get("mean_accepted_length") for one in row["decoding"]}
    return known.get(temperature)


def table(result: dict[str, Any]) -> str:
    """Markdown: a row for each finished run, then what the two writers differ by at the same number of samples."""
    head = ["answers by", "samples", "tokens", "passes over them", "accepted length, T = 0", "T = 1",
            "1 - TV at position 1", "CPU-seconds"]  # fmt: skip
    rows = [
        [row["answers"], f"{row['samples']:,}", f"{row['data']['tokens']:,}",
         f"{row['tokens'] / row['data']['tokens']:.1f}", _number(length_at(row, 0.0)), _number(length_at(row, 1.0)),
         _number(row["forced"][0]), f"{row['cpu_seconds']:,.0f}"]
        for row in result["rows"]
    ]  # fmt: skip
    out = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    difference = own_answers(result["rows"])
    return "\n".join(out) + (f"\n\n{difference}" if difference else "")


def own_answers(rows: Sequence[dict[str, Any]]) -> str | None:
    """The two writers side by side; None until both are measured."""
    by = {(row["answers"], row["samples"]): row for row in rows}
    both = [number for writer, number in by if writer == "source" and ("target", number) in by]
    if not both:
        return None
    own, source = by["target", both[0]], by["source", both[0]]
    parts = []
    for temperature in (0.0, 1.0):
        pair = length_at(own, temperature), length_at(source, temperature)
        if pair[0] is not None and pair[1] is not None:
            parts.append(f"{pair[0]:.3f} against {pair[1]:.3f} at T = {temperature:g}")
    return (
        f"With {both[0]:,} samples of equal length, the target's own answers against the source text: "
        f"accepted length {', '.join(parts)} (one run each: no spread is known)."
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def report(options: argparse.Namespace) -> None:
    """`data_study.py report`."""
    result = results(options.work)
    data = options.page.with_suffix(".json")
    data.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plan, machine = result["plan"], result["plan"]["machine"]
    asked = plan["asked"]
    terms = (
        f"DSpark for `{asked['target']}`, {plan['cpu_seconds']:g} CPU-seconds for each run on one thread of "
        f"{machine['cpu']}, at most {plan['steps']:,} steps; judged by decoding {HELD_OUT} prompts that no run has "
        f"met. Made by `recipes/embedded/data_study.py`; all numbers are in [{data.name}]({data.name})."
    )
    text = ["# Whose answers, and how many", "", terms, "", table(result), ""]
    options.page.write_text("\n".join(text), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- command


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        options.command(options)
    except ValueError as error:
        print(f"data_study.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{run,report}")
    begin = commands.add_parser("run", help="answer, prepare and train what is missing; a second call goes on")
    begin.add_argument("--work", type=Path, required=True, help="folder of samples and runs")
    begin.add_argument("--answers", type=Path, help="answers of drafters.py; they may still be being made")
    begin.add_argument("--target", default="embedded")
    folder = Path(__file__).resolve().parents[2] / "src" / "forerun" / "embedded" / "target"
    begin.add_argument("--tokenizer", type=Path, default=folder, help="folder of the target")
    begin.add_argument("--samples", type=int, nargs="+", default=[60, 250, 1000], help="how many, run by run")
    begin.add_argument("--minutes", type=float, default=5.5, help="processor time of a run, at most")
    begin.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    begin.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all runs, for a trial"
    )
    begin.set_defaults(command=run)
    page = commands.add_parser("report", help="write page and JSON")
    page.add_argument("--work", type=Path, required=True, help="folder of the runs")
    page.add_argument("--page", type=Path, required=True, help="Markdown file; the data go beside it")
    page.set_defaults(command=report)
    return parser


if __name__ == "__main__":
    sys.exit(main())
