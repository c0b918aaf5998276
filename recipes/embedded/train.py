"""A plain training loop: checkpoints by atomic rename, resumes at the step it stopped, safe to terminate."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from config import BLOCK, Phase
from data import Blocks
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

CHECKPOINT_SECONDS = 150.0
HELD_OUT_EVERY = 50  # steps between looks at a sample of the held-out text


def optimizers_for(model: nn.Module, phase: Phase) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest. Not compared with AdamW alone here."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=phase.matrix_lr, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=phase.vector_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    ]


def lr_scale(phase: Phase, step: int) -> float:
    warm = (step + 1) / phase.warmup_steps
    decay = (phase.steps - step) / max(1.0, phase.steps * phase.decay_share)
    return min(1.0, warm, decay)


def text_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean nats per predicted token; logits [B, T, V], tokens [B, T]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def distil_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean KL(target || draft) per position, both [B, T, V]."""
    target_logprobs = F.log_softmax(target_logits.float(), dim=-1)
    logprobs = F.log_softmax(logits.float(), dim=-1)
    return F.kl_div(logprobs, target_logprobs, log_target=True, reduction="sum") / logits[..., 0].numel()


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@torch.inference_mode()
def held_out_nats(model: nn.Module, windows: Tensor, batch: int = 8) -> float:
    """Mean nats per token; windows [N, T + 1]."""
    total = 0.0
    for rows in windows.split(batch):
        with half():
            logits = model(input_ids=rows, use_cache=False).logits
        total += text_loss(logits, rows).item() * len(rows)
    return total / len(windows)


class Stopped(Exception):
    """The run was asked to end; its state is saved."""


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM and SIGINT only raise a flag, so that a step is never cut in half."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Run:
    """One phase: model, optimizers, step counter and where they are kept."""

    def __init__(self, phase: Phase, model: Qwen3ForCausalLM, blocks: Blocks, folder: Path) -> None:
        self.phase, self.model, self.blocks = phase, model, blocks
        self.path = folder / f"{phase.name}.pt"
        self.log = folder / f"{phase.name}.jsonl"
        self.optimizers = optimizers_for(model, phase)
        self.step = 0
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step = state["step"]

    @property
    def finished(self) -> bool:
        return self.step >= self.phase.steps

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.path)

    def record(self, **entry: Any) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def train(self, windows: Tensor, publish: Callable[[], None], target: nn.Module | None = None) -> None:
        """Run to the end of the phase. `windows` are watched, never trained on; `publish` follows each checkpoint."""
        saved_at = began = time.monotonic()
        first_step = self.step
        with stop_requests() as stop:
            while not self.finished:
                loss = self._one_step(target)
                self.step += 1
                self._report(loss, (time.monotonic() - began) / (self.step - first_step))
                if self.step % HELD_OUT_EVERY == 0 or self.finished:
                    self.record(step=self.step, held_out=held_out_nats(self.model, windows))
                due = time.monotonic() - saved_at > CHECKPOINT_SECONDS
                if due or self.finished or stop():
                    self.save()
                    saved_at = time.monotonic()
                    if stop() and not self.finished:
                        raise Stopped(f"{self.phase.name}: saved at step {self.step}")
                    publish()

    def _one_step(self, target: nn.Module | None) -> float:
        for optimizer, rate in zip(self.optimizers, (self.phase.matrix_lr, self.phase.vector_lr), strict=True):
            optimizer.param_groups[0]["lr"] = rate * lr_scale(self.phase, self.step)
        tokens = self.blocks.batch(self.phase, self.step)
        with half():
            logits = self.model(input_ids=tokens, use_cache=False).logits
        loss = text_loss(logits, tokens)
        if target is not None:
            with half(), torch.no_grad():
                target_logits = target(input_ids=tokens, use_cache=False).logits
            share = self.phase.distil_share
            loss = (1 - share) * loss + share * distil_loss(logits, target_logits)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def _report(self, loss: float, seconds_per_step: float) -> None:
        self.record(step=self.step, loss=loss, seconds_per_step=seconds_per_step)
        if self.step % 10 == 0:
            left = (self.phase.steps - self.step) * seconds_per_step / 60
            speed = self.phase.blocks_per_step * BLOCK / seconds_per_step
            where = f"{self.phase.name} {self.step}/{self.phase.steps}"
            print(f"{where} loss {loss:.3f} {speed:.0f} tok/s {left:.1f} min left", file=sys.stderr, flush=True)
