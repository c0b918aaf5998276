"""The recipe of the embedded target and its small draft, and what it has put into the package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

import forerun

PACKAGE = Path(forerun.__file__).parent / "embedded"
MEGABYTE = 1_000_000


# ------------------------------------------------------------------------------------------------------ held-out text


def test_held_out_modules_and_their_tests_are_never_trained_on(
    target_recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module, a package, a test and a helper of that name stay out; what only looks alike stays in."""
    out = ["heapq.py", "test/test_heapq.py", "csv/__init__.py", "test/csv/helper.py", "json/tests/test_string.py"]
    kept = ["abc.py", "test/test_abc.py", "heapq_like.py", "concurrent/futures/thread.py"]
    for name in [*out, *kept]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" * 40)
    monkeypatch.setattr(target_recipe.corpus, "stdlib_root", lambda: tmp_path)
    train, held_out = target_recipe.corpus.split()
    assert sorted(doc.name for doc in train) == sorted(kept)
    assert [doc.name for doc in held_out] == ["heapq.py"]


def test_the_card_lists_them_and_the_prompts_are_cut_from_them(target_recipe: SimpleNamespace) -> None:
    """Exactly the recipe's list; every prompt says which module and line it is from."""
    card = (PACKAGE / "README.md").read_text(encoding="utf-8")
    listed = card[card.index("Never trained on") : card.index("The held-out loss is measured on them")]
    assert set(re.findall(r"`(\w+)`", listed)) == set(target_recipe.corpus.HELD_OUT)
    lines = (PACKAGE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    sources = [json.loads(line)["source"].partition(".py:")[0] for line in lines]
    assert len(sources) >= 20
    assert set(sources) <= set(target_recipe.corpus.HELD_OUT)
    for needed in ("held-out loss", "PSF License", "Qwen3"):
        assert needed in card


# ------------------------------------------------------------------------------------------------------- the package


def test_target_and_small_are_small_enough_and_what_the_recipe_says(target_recipe: SimpleNamespace) -> None:
    """At most 30 MB together, safetensors, Qwen3 of 12 thin layers and of one, one tokenizer of 4,096."""
    shapes = {"target": target_recipe.config.TARGET_SHAPE, "small": target_recipe.config.SMALL_SHAPE}
    size = 0
    for name, shape in shapes.items():
        folder = PACKAGE / name
        size += sum(file.stat().st_size for file in folder.iterdir())
        found = json.loads((folder / "config.json").read_text())
        measures = (found["num_hidden_layers"], found["hidden_size"], found["intermediate_size"], found["vocab_size"])
        assert measures == (shape.layers, shape.hidden, shape.feed_forward, 4096)
        assert found["model_type"] == "qwen3"
        assert (folder / "model.safetensors").is_file()
    assert size <= 30 * MEGABYTE
    assert (shapes["target"].layers, shapes["small"].layers) == (12, 1)
    one, other = ((PACKAGE / name / "tokenizer.json").read_bytes() for name in shapes)
    assert one == other


# --------------------------------------------------------------------------------------------------------- going on


def _run(recipe: SimpleNamespace, folder: Path, tokens: Path):
    """A phase of four steps over a tiny model."""
    phase = recipe.config.Phase(
        name="tiny", steps=4, blocks_per_step=2, short_context_steps=1, matrix_lr=0.02, vector_lr=4e-3,
        warmup_steps=2, decay_share=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(recipe.config.model_config(recipe.config.Shape(1, 32, 32))).float()
    folder.mkdir(exist_ok=True)
    return recipe.train.Run(phase, model, recipe.data.Blocks(tokens, phase.seed), folder)


def test_training_goes_on_where_it_stopped(
    target_recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two of four steps and begun again: the very weights and moments of a run that was not; a finished
    phase takes no further step."""
    monkeypatch.setattr(target_recipe.data, "BLOCK", 16)
    monkeypatch.setattr(target_recipe.train, "BLOCK", 16)
    rows = [np.arange(i, i + 90, dtype=np.uint16) % 4096 for i in range(5)]
    tokens = tmp_path / "train.npz"
    target_recipe.data.save_documents(tokens, rows, [False, True, False, False, False])
    windows = torch.arange(34).reshape(2, 17)
    whole = _run(target_recipe, tmp_path / "whole", tokens)
    whole.train(windows, lambda: None)

    first = _run(target_recipe, tmp_path / "halves", tokens)

    @contextmanager
    def asked_after_two_steps() -> Iterator[Callable[[], bool]]:
        yield lambda: first.step == 2

    with monkeypatch.context() as patch:
        patch.setattr(target_recipe.train, "stop_requests", asked_after_two_steps)
        with pytest.raises(target_recipe.train.Stopped, match="saved at step 2"):
            first.train(windows, lambda: None)
    second = _run(target_recipe, tmp_path / "halves", tokens)
    assert second.step == 2
    published: list[int] = []
    second.train(windows, lambda: published.append(second.step))
    assert published == [4]
    for one, other in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    again = _run(target_recipe, tmp_path / "halves", tokens)
    assert again.finished
    assert len((tmp_path / "halves" / "tiny.jsonl").read_text().splitlines()) == 4 + 1
