"""Builds the embedded models with one command; run again, it goes on where it stopped.

python recipes/embedded/build.py --out src/forerun/embedded --work DIR [--stages tokenizer,data,target,small,card]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from config import (
    SHALLOW_SHAPE,
    SMALL_DISTIL,
    SMALL_SHAPE,
    SMALL_TEXT,
    TARGET,
    TARGET_SHALLOW,
    TARGET_SHAPE,
    Phase,
    Shape,
    model_config,
)
from corpus import fingerprint, split
from data import Blocks, encode, save_documents, windows
from export import export
from tokenizer import load_tokenizer, train_tokenizer
from torch import nn
from train import Run, Stopped
from transformers import Qwen3ForCausalLM

from forerun.target.allocator import keep_freed_memory

WATCHED_WINDOWS = 24  # of the held-out text, for the curve during training; the card uses all of it


class Build:
    """The stages, each a no-op once its product lies in the work folder."""

    def __init__(self, out: Path, work: Path) -> None:
        self.out, self.work = out, work
        self.tokenizer_folder = work / "tokenizer"
        self.train_file, self.held_out_file = work / "train.npz", work / "held_out.npz"

    def tokenizer(self) -> None:
        docs, _ = split()
        if not (self.tokenizer_folder / "tokenizer.json").exists():
            trained = train_tokenizer(doc.text for doc in docs if not doc.is_test)
            trained.save_pretrained(self.tokenizer_folder)
            (self.work / "corpus.txt").write_text(fingerprint(docs))
        if (self.work / "corpus.txt").read_text() != fingerprint(docs):
            raise ValueError("this --work folder was made from another standard library; give a fresh one")

    def data(self) -> None:
        if self.train_file.exists():
            return
        tokenizer = load_tokenizer(self.tokenizer_folder)
        train, held_out = split()
        save_documents(self.held_out_file, encode(held_out, tokenizer), [False] * len(held_out))
        save_documents(self.train_file, encode(train, tokenizer), [doc.is_test for doc in train])

    def target(self) -> None:
        shallow = new_model(SHALLOW_SHAPE, TARGET_SHALLOW)
        model = new_model(TARGET_SHAPE, TARGET)
        if not (self.work / f"{TARGET.name}.pt").exists():
            self._train(TARGET_SHALLOW, shallow, "target")
            grow(shallow, model)
        self._train(TARGET, model, "target")

    def small(self) -> None:
        model = new_model(SMALL_SHAPE, SMALL_TEXT)
        self._train(SMALL_TEXT, model, "small")
        self._train(SMALL_DISTIL, model, "small", self._trained_target())

    def card(self) -> None:
        from card import write_card  # the one stage with its own dependencies on the finished models

        write_card(self.out, self.work)

    def _train(self, phase: Phase, model: Qwen3ForCausalLM, name: str, target: nn.Module | None = None) -> None:
        run = Run(phase, model, Blocks(self.train_file, phase.seed), self.work)
        publish = partial(export, model, self.tokenizer_folder, self.out / name)
        if run.finished:
            publish()
            return
        watched = windows(self.held_out_file)
        run.train(watched[:: len(watched) // WATCHED_WINDOWS], publish, target)

    def _trained_target(self) -> Qwen3ForCausalLM:
        model = new_model(TARGET_SHAPE, TARGET)
        model.load_state_dict(torch.load(self.work / "target.pt", weights_only=True)["model"])
        return model.eval()


def new_model(shape: Shape, phase: Phase) -> Qwen3ForCausalLM:
    """float32 weights, autocast does the rest. Matrices that write into the residual stream start smaller."""
    torch.manual_seed(phase.seed)
    model = Qwen3ForCausalLM(model_config(shape)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * shape.layers) ** -0.5)
    return model


@torch.no_grad()
def grow(shallow: Qwen3ForCausalLM, deep: Qwen3ForCausalLM) -> None:
    """Copy `shallow` into `deep`, whose added layers start as copies that write nothing: the same function."""
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())
    repeats = len(deep.model.layers) // len(shallow.model.layers)
    for index, layer in enumerate(deep.model.layers):
        layer.load_state_dict(shallow.model.layers[index // repeats].state_dict())
        if index % repeats:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="package folder that receives target/ and small/")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder: tokens, checkpoints, loss curves")
    parser.add_argument("--stages", default="tokenizer,data,target,small,card")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    options.work.mkdir(parents=True, exist_ok=True)
    build = Build(options.out, options.work)
    stages: list[tuple[str, Callable[[], None]]] = [(name, getattr(build, name)) for name in options.stages.split(",")]
    try:
        for name, stage in stages:
            print(f"stage {name}", file=sys.stderr, flush=True)
            stage()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 143
    return 0


if __name__ == "__main__":
    sys.exit(main())
