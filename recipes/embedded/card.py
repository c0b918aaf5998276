"""Measures the exported models as users load them, and writes the model card and the prompts."""

import json
import math
import platform
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from config import BLOCK, SMALL_DISTIL, SMALL_TEXT, TARGET, TARGET_SHALLOW, TEST_SHARE, Phase
from corpus import HELD_OUT, fingerprint, split
from data import windows
from prompts import write_prompts
from tokenizer import load_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CONTINUED_PROMPTS = 20
CONTINUATION = 64


@dataclass(frozen=True)
class Agreement:
    """Of the draft with the target, position by position, with the same context."""

    greedy: float  # share of positions with the same most probable token
    sampled: float  # mean of 1 - TV: the chance that a token drawn from the draft is accepted at temperature 1


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float()


def agreement(target_logits: Tensor, small_logits: Tensor) -> Agreement:
    """Both [..., V]."""
    same = target_logits.argmax(-1) == small_logits.argmax(-1)
    overlap = torch.minimum(target_logits.softmax(-1), small_logits.softmax(-1)).sum(-1)
    return Agreement(same.float().mean().item(), overlap.mean().item())


def mean(parts: list[Agreement]) -> Agreement:
    return Agreement(sum(p.greedy for p in parts) / len(parts), sum(p.sampled for p in parts) / len(parts))


def held_out(target: PreTrainedModel, small: PreTrainedModel, rows: Tensor) -> tuple[float, float, Agreement]:
    """(target's nats per token, small's, agreement) over windows [N, T + 1]."""
    losses, parts = [], []
    for batch in rows.split(8):
        pair = [logits_of(model, batch)[:, :-1] for model in (target, small)]
        losses.append([F.cross_entropy(x.flatten(0, 1), batch[:, 1:].flatten()).item() * len(batch) for x in pair])
        parts += [agreement(*pair)] * len(batch)
    target_nats, small_nats = (sum(column) / len(rows) for column in zip(*losses, strict=True))
    return target_nats, small_nats, mean(parts)


def along_generated(
    target: PreTrainedModel,
    small: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    sample: bool,
) -> Agreement:
    """Agreement on the target's own continuations, which is where a draft works."""
    torch.manual_seed(0)
    parts = []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        text = target.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=CONTINUATION,
            do_sample=sample,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            pad_token_id=tokenizer.eos_token_id,
        )
        first = tokens.shape[1] - 1
        parts.append(agreement(*(logits_of(model, text)[:, first:-1] for model in (target, small))))
    return mean(parts)


def bits_per_byte(nats: float, rows: Tensor, tokenizer: PreTrainedTokenizerFast) -> float:
    predicted = rows[:, 1:]
    size = sum(len(tokenizer.decode(row, skip_special_tokens=True).encode()) for row in predicted)
    return nats * predicted.numel() / math.log(2) / size


def schedule(phase: Phase) -> str:
    tokens = phase.steps * phase.blocks_per_step * BLOCK
    return f"- `{phase.name}`: {phase.steps} steps, {tokens / 1e6:.1f}M tokens"


def write_card(out: Path, work: Path) -> None:
    tokenizer = load_tokenizer(out / "target")
    write_prompts(out / "prompts.jsonl", tokenizer)
    target, small = load(out / "target"), load(out / "small")
    rows = windows(work / "held_out.npz")
    target_nats, small_nats, on_text = held_out(target, small, rows)
    lines = (out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines][::2][:CONTINUED_PROMPTS]
    greedy = along_generated(target, small, tokenizer, prompts, sample=False)
    sampled = along_generated(target, small, tokenizer, prompts, sample=True)
    train, _ = split()
    code = [doc for doc in train if not doc.is_test]
    values = {
        "python": platform.python_version(),
        "fingerprint": fingerprint(train),
        "files": f"{len(code)} files, {sum(len(doc.text.encode()) for doc in code) / 1e6:.1f} MB",
        "test_files": f"{len(train) - len(code)} test files",
        "test_share": f"{TEST_SHARE:.0%}",
        "target_parameters": f"{target.num_parameters() / 1e6:.1f}M",
        "small_parameters": f"{small.num_parameters() / 1e6:.1f}M",
        "target_nats": f"{target_nats:.2f}",
        "small_nats": f"{small_nats:.2f}",
        "target_bits": f"{bits_per_byte(target_nats, rows, tokenizer):.2f}",
        "small_bits": f"{bits_per_byte(small_nats, rows, tokenizer):.2f}",
        "schedules": "\n".join(schedule(phase) for phase in (TARGET_SHALLOW, TARGET, SMALL_TEXT, SMALL_DISTIL)),
        "agreement_text": f"{on_text.greedy:.0%} | {on_text.sampled:.0%}",
        "agreement_greedy": f"{greedy.greedy:.0%} | {greedy.sampled:.0%}",
        "agreement_sampled": f"{sampled.greedy:.0%} | {sampled.sampled:.0%}",
        "held_out": textwrap.fill(", ".join(f"`{name}`" for name in HELD_OUT), width=119),
    }
    template = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    (out / "README.md").write_text(re.sub(r"\{(\w+)\}", lambda m: values[m[1]], template), encoding="utf-8")
