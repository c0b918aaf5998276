"""The benchmark of two engines: its arithmetic on made-up rows, and the whole of it on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def _row(prompt: int, config: str, seconds: float, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    row = {
        "prompts": [prompt],
        "config": config,
        "trial": 0,
        "seconds": seconds,
        "cpu_seconds": seconds,
        "ids": [ids or [1, 2, 3, 4]],
        "arrivals": [0.1, 0.2, 0.5],
        "target_passes": 3,
        "draft_passes": 0,
        "counters": None,
        "margins": [],
        "load_average": 0.0,
        "at": "2026-01-01T00:00:00+00:00",
    }
    return row | more


PLAIN, OTHER = "forerun-plain-k0-t0-b1", "transformers-plain-k0-t0-b1"


# ---------------------------------------------------------------------------------------------------------- arithmetic


def test_a_name_is_its_configuration() -> None:
    """Every configuration comes back from the name its rows carry, and no two share one."""
    from contenders import batch_one, batched
    from summary import config_of

    configs = batch_one((0.0, 1.0))
    configs += batched([c for c in configs if c.method == "small" and c.k == 3 and c.engine == "forerun"], 4)
    assert [config_of(config.name) for config in configs] == configs
    assert len({config.name for config in configs}) == len(configs)


def test_ratios_are_taken_prompt_by_prompt() -> None:
    """On the same prompts 2x and 4x are a median of 3x; a prompt that only one of them has is left out."""
    from summary import ratios, spread

    slow = [_row(0, OTHER, 8.0), _row(1, OTHER, 4.0), _row(2, OTHER, 1.0)]
    fast = [_row(0, PLAIN, 8.0, ids=list(range(8))), _row(1, PLAIN, 1.0)]
    values = ratios(slow, fast)
    assert values == [2.0, 4.0]
    result = spread(values)
    assert result is not None
    assert (result["median"], result["min"], result["max"], result["prompts"]) == (3.0, 2.0, 4.0, 2)


def test_trials_of_a_prompt_count_as_their_median() -> None:
    """One disturbed trial does not move a prompt's time."""
    from summary import per_prompt

    rows = [_row(0, PLAIN, seconds, trial=i) for i, seconds in enumerate((4.0, 400.0, 8.0))]
    assert per_prompt(rows) == {(0,): 2.0}


def test_best_is_the_fastest_median() -> None:
    """The K of the second stage has the smallest median over prompts, whatever its mean or best prompt."""
    from summary import best_drafted

    rows = [_row(i, "forerun-small-k2-t0-b1", seconds) for i, seconds in enumerate((2.0, 2.0, 9.0))]
    rows += [_row(i, "forerun-small-k4-t0-b1", seconds) for i, seconds in enumerate((1.0, 3.0, 3.0))]
    assert [config.k for config in best_drafted(rows)] == [2]


def test_float32_differences_are_found_with_their_lead() -> None:
    """A run that leaves plain decoding at its third token is named, with the lead the best logit had there."""
    from summary import exactness

    rows = [
        _row(0, PLAIN, 1.0, ids=[5, 6, 7, 8], margins=[[0.5, 0.25, 0.001, 2.0]]),
        _row(0, "forerun-small-k2-t0-b1", 1.0, ids=[5, 6, 9, 9]),
        _row(0, "forerun-small-k3-t0-b1", 1.0, ids=[5, 6, 7, 8]),
        _row(0, OTHER, 1.0, ids=[5, 6, 7, 8]),
    ]
    result = exactness(rows)
    assert result["differences"] == [{"config": "forerun-small-k2-t0-b1", "prompt": 0, "position": 2, "margin": 0.001}]
    assert result["runs"] == {"forerun": 2, "transformers": 1}
    assert result["smallest_margins"][0] == {"margin": 0.001, "prompt": 0, "position": 2}


def test_roofline_of_a_worked_example() -> None:
    """K = 2, length 2.4, T(1) = 100, D(1) = 20, T(3) = 110 between 2 and 4 rows: 240 / 150. Bytes 30, 10: 72 / 50."""
    from costs import prediction

    target = {"forerun_ms": {"1": 100.0, "2": 100.0, "4": 120.0}, "bytes": 30}
    costs = {"models": {"target": target, "draft": {"forerun_ms": {"1": 20.0}, "bytes": 10}}}
    assert prediction(costs, 2, 2.4) == pytest.approx({"from_passes": 1.6, "from_bytes": 1.44})


# ---------------------------------------------------------------------------------------------------------------- rows


def test_a_torn_line_is_measured_again(tmp_path: Path) -> None:
    """A process that died while writing costs the row it wrote, not the file."""
    from rows import Rows

    rows = Rows(tmp_path)
    rows.append(_row(0, PLAIN, 1.0))
    rows.append(_row(1, PLAIN, 1.0))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = Rows(tmp_path)
    assert ((0,), PLAIN, 0) in again
    assert ((1,), PLAIN, 0) not in again
    again.append(_row(1, PLAIN, 2.0))
    assert len(Rows(tmp_path)) == 2


def test_rows_of_another_setup_are_refused(tmp_path: Path) -> None:
    """Rows measured with other versions or prompts do not mix; the message names what changed."""
    from rows import settle_setup

    settle_setup(tmp_path, {"torch": "1", "threads": 2})
    settle_setup(tmp_path, {"torch": "1", "threads": 2})
    with pytest.raises(ValueError, match="threads: 2 then, 1 now"):
        settle_setup(tmp_path, {"torch": "1", "threads": 1})


def test_every_prompt_has_an_order_of_its_own() -> None:
    """The order depends on its key alone, and configurations do not always follow each other in the same way."""
    from contenders import batch_one
    from measuring import shuffled

    configs = batch_one((0.0,))
    assert shuffled(configs, "0/1/0") == shuffled(configs[::-1], "0/1/0")
    assert shuffled(configs, "0/1/0") != shuffled(configs, "0/2/0")


# ----------------------------------------------------------------------------------------------------------- the whole


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abcabcabc", "one two", "x", "zz top")))
    return path


def _run(models: tuple[Path, Path], prompts: Path, out: Path, *more: str) -> int:
    from qwen import main

    target, draft = models
    places = ["--target", str(target), "--draft", str(draft), "--prompts", str(prompts), "--out", str(out)]
    return main(["run", *places, "--threads", "1", "--max-tokens", "6", *more])


def test_a_run_goes_on_and_ends_in_a_page(
    tiny_qwen3_dir: Path, tiny_small_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Time up, then more configurations: each row is measured once; costs, float32 and the page follow from them."""
    from qwen import main
    from rows import Rows

    models, out, exact = (tiny_qwen3_dir, tiny_small_dir), tmp_path / "results", tmp_path / "results32"
    few = ("--limit", "4", "--configs", "*-plain-*", "*-small-k2-t?-b*", "transformers-small-kdefault-*")
    assert _run(models, prompts, out, *few, "--minutes", "0") == 3
    assert len(Rows(out)) == 0
    assert _run(models, prompts, out, *few) == 0
    measured = {name for _, name, _ in Rows(out)._rows}
    assert {"forerun-small-k2-t1-b4", "forerun-plain-k0-t0-b4", "transformers-plain-k0-t1-b4"} <= measured
    before = (out / "rows.jsonl").read_bytes()
    assert _run(models, prompts, out, *few) == 0
    assert (out / "rows.jsonl").read_bytes() == before

    wanted = ("--limit", "2", "--dtype", "float32", "--configs", "*-k0-*", "*-k3-*")
    assert _run(models, prompts, exact, *wanted) == 0
    place = ["--target", str(models[0]), "--draft", str(models[1]), "--out", str(out)]
    assert main(["costs", *place, "--threads", "1", "--repeats", "1"]) == 0
    page = tmp_path / "docs" / "qwen.md"
    remarks = tmp_path / "remarks.md"
    remarks.write_text("Tiny models, hence no faster.\n")
    words = ["--out", str(out), "--exact", str(exact), "--page", str(page), "--remarks", str(remarks)]
    assert main(["report", *words]) == 0
    assert "\n\nTiny models, hence no faster.\n\n" in page.read_text(encoding="utf-8")
    _check_page(page)


def test_a_disturbed_row_is_measured_again(
    tiny_qwen3_dir: Path, tiny_small_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """`--again-below` repeats exactly the rows that got too little processor time; the later measurement counts."""
    from rows import Rows

    models, few = (tiny_qwen3_dir, tiny_small_dir), ("--limit", "1", "--configs", "*-plain-k0-t0-b1")
    assert _run(models, prompts, tmp_path, *few) == 0
    disturbed, kept = (row | {"seconds": 1.0} for row in Rows(tmp_path))
    disturbed["cpu_seconds"], kept["cpu_seconds"] = 0.1, 0.9
    for row in (disturbed, kept):
        Rows(tmp_path).append(row)
    assert _run(models, prompts, tmp_path, *few, "--again-below", "0.8") == 0
    after = {row["config"]: row for row in Rows(tmp_path)}
    assert after[disturbed["config"]]["seconds"] != 1.0
    assert after[kept["config"]] == kept


def _check_page(page: Path) -> None:
    """Every part is there, no placeholder is left, and no path of this machine."""
    text, data = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    assert "$" not in text
    assert str(page.parents[1]) not in text
    for part in ("Conditions", "Roofline", "float32", "batch 4", "Acceptance by position", "(qwen.png)"):
        assert part in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(page.with_suffix(".csv").read_text().splitlines()) == 1 + len(data["configs"])
    # On a tiny random model in float32 an id may differ only where two logits are as good as equal.
    assert all(d["margin"] is None or d["margin"] < 1e-4 for d in data["exact"]["differences"])
    assert data["exact"]["runs"]["transformers"] > 0


def test_transformers_drafts_exactly_k(tiny_qwen3_dir: Path, tiny_small_dir: Path) -> None:
    """K = 2 means rounds of two assistant passes: transformers is compared at the K we print."""
    from contenders import Config, Job, Transformers

    engine = Transformers(str(tiny_qwen3_dir), str(tiny_small_dir), "float32", 1)
    run = engine.run(Config("transformers", "small", 2, 1.0), Job([[5, 6, 7, 8]], 12, 0))
    rounds = run.target_passes
    # The first round's prompt pass is one draft pass too, and the last rounds may draft less before the limit.
    assert 2 * (rounds - 2) <= run.draft_passes <= 2 * rounds
    assert len(run.arrivals) == rounds


def test_a_batch_is_cut_at_its_own_end() -> None:
    """What a batch pads behind a row that ended is not counted as its tokens."""
    from contenders import _until_end

    assert _until_end([4, 5, 2, 2, 2], 2) == [4, 5, 2]
    assert _until_end([4, 5, 6], [2, 3]) == [4, 5, 6]


def test_an_engine_that_was_not_compared_is_not_praised() -> None:
    """Without rows of transformers the page does not say that none of them differed."""
    from page import _exact

    lead = [{"margin": 0.5, "prompt": 0, "position": 1}]
    exact = {"prompts": 1, "tokens": 8, "runs": {"forerun": 2}, "differences": [], "smallest_margins": lead}
    assert "No run of transformers was compared with it." in _exact(exact)
    assert "In 2 other runs of forerun no id differed from it." in _exact(exact)
