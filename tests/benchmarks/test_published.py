"""Numbers that the READMEs and docs/ quote are those of the published pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readme_quotes_the_page(readme: str) -> None:
    """The table of speeds: median tokens/s and speed-up of `docs/benchmarks/qwen.json`, to the digits shown."""
    configs = json.loads((ROOT / "docs" / "benchmarks" / "qwen.json").read_text(encoding="utf-8"))["configs"]
    text = (ROOT / readme).read_text(encoding="utf-8")
    for engine, name in (("forerun", "forerun"), ("transformers", "transformers `generate`")):
        [row] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
        plain, *drafted = (cell.strip() for cell in row.split("|"))
        speed = {m: configs[f"{engine}-{m}-t0-b1"] for m in ("plain-k0", "small-k6", "ngram-k6")}
        assert plain == f"{speed['plain-k0']['tokens_per_second']['median']:.1f}"
        assert drafted == [
            f"{speed[m]['tokens_per_second']['median']:.1f} ({speed[m]['speedup']['median']:.2f}x)"
            for m in ("small-k6", "ngram-k6")
        ]


def test_scheduling_quotes_the_grid() -> None:
    """Its cells and worst ratios of `docs/simulation/never-slower.json`."""
    found = json.loads((ROOT / "docs" / "simulation" / "never-slower.json").read_text(encoding="utf-8"))
    text = " ".join((ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8").split())
    ratios = {name: f"{one['ratio']:.3f}".removeprefix("0") for name, one in found["worst"].items()}
    assert f"in {found['cells']} cells of" in text
    assert f"{ratios['over_plain']} of plain decoding" in text
    assert f"{ratios['over_plain_always_wrong']} with a drafter that is always wrong" in text
    assert f"{ratios['over_best_fixed']} of the best fixed K" in text
