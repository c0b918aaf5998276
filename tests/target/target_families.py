"""Tiny random models of many families, stock and ours, and a decode loop small enough to trust."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import transformers as tf

from forerun.target.base import BLOCK_SIZE, Batch, Segment
from forerun.target.blocks import BlockPool
from forerun.target.hf import HFTarget
from forerun.target.table import LetterTokenizer

VOCAB = 61
LAYERS = 4
WINDOW = 8
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 128,
}


def _without_head_dim(**more):
    return {**{k: v for k, v in BASE.items() if k != "head_dim"}, **more}


CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**BASE),
    "mistral": lambda: tf.MistralConfig(**BASE, sliding_window=WINDOW),
    "qwen2": lambda: tf.Qwen2Config(**BASE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": lambda: tf.Qwen3Config(**BASE),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**BASE, **EXPERTS, decoder_sparse_step=1),
    "gemma2": lambda: tf.Gemma2Config(**BASE, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **BASE, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "phi3": lambda: tf.Phi3Config(**_without_head_dim(original_max_position_embeddings=128, rope_parameters=LONGROPE)),
}
"""The families every claim is tried on."""

FURTHER = {
    # Passes no window to its attention: the mask alone has it.
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **BASE, **EXPERTS, shared_expert_intermediate_size=16, use_sliding_window=True, sliding_window=WINDOW
    ),
    "granite": lambda: tf.GraniteConfig(**BASE, logits_scaling=4.0, embedding_multiplier=2.0),
    "olmo2": lambda: tf.Olmo2Config(**BASE),
    "cohere2": lambda: tf.Cohere2Config(**BASE, sliding_window=WINDOW),
    # Keys and values of different width.
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **_without_head_dim(
            num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=12, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
            moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1,
        )
    ),
    # Positions are learned, not rotated.
    "gpt2": lambda: tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=256),
    # Its decoder lies one level deeper.
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS, ffn_dim=48, num_attention_heads=4,
        max_position_embeddings=256, word_embed_proj_dim=32,
    ),
}  # fmt: skip
"""Families with something of their own; logits only."""


def stock_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **fields):
    """A model as transformers makes it, with weights that make every part matter; `fields` go into its config."""
    config = {**CONFIGS, **FURTHER}[name]()
    for field_name, value in fields.items():
        setattr(config, field_name, value)
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def pair(name: str, **options):
    """(stock model, target over a copy of it)."""
    stock = stock_model(name)
    return stock, HFTarget(copy.deepcopy(stock), LetterTokenizer(VOCAB), **options)


@torch.no_grad()
def stock_logits(stock, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] of one text, by the model's own forward without any cache."""
    return stock(torch.tensor([list(ids)]), use_cache=False).logits[0]


def texts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def scattered_tables(rows: Sequence[int], num_blocks: int, seed: int = 2) -> list[list[int]]:
    """Block tables in no order, interleaved."""
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-n // BLOCK_SIZE))] for n in rows]


def chunked_logits(target, ids: Sequence[Sequence[int]], tables, chunks: Sequence[int], taps=()):
    """Runs several texts side by side in chunks of the given sizes, a different one for each text in each pass.

    Returns the logits [T, V] and features [T, m * H] of each text.
    """
    done = [0] * len(ids)
    logits = [[] for _ in ids]
    features = [[] for _ in ids]
    turn = 0
    while any(d < len(i) for d, i in zip(done, ids, strict=True)):
        segments, who = [], []
        for r, text in enumerate(ids):
            tokens = text[done[r] : done[r] + chunks[(r + turn) % len(chunks)]]
            if tokens:
                segments.append(Segment(tokens, done[r], tables[r], len(tokens)))
                who.append(r)
                done[r] += len(tokens)
        out = target.forward(Batch(segments), taps)
        row = 0
        for r, segment in zip(who, segments, strict=True):
            end = row + len(segment.tokens)
            logits[r].append(out.logits[row:end])
            if taps:
                features[r].append(out.features[row:end])
            row = end
        turn += 1
    return [torch.cat(x) for x in logits], [torch.cat(x) for x in features if x]


@dataclass
class Running:
    """One request of the decode loop."""

    tokens: list[int]
    joins: int
    wanted: int
    prompt: int = 0
    rows: int = 0
    table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def finished(self) -> bool:
        return len(self.tokens) - self.prompt >= self.wanted


def decode_greedily(target, prompts: Sequence[list[int]], joins: Sequence[int], wanted: int) -> list[list[int]]:
    """Plain greedy decoding of requests that join at different steps; prefill and decode rows share passes."""
    requests = [Running(list(p), j, wanted) for p, j in zip(prompts, joins, strict=True)]
    pool = BlockPool(sum(-(-(len(p) + wanted) // BLOCK_SIZE) for p in prompts))
    target.allocate(pool.num_blocks)
    step = 0
    while not all(r.finished for r in requests):
        active = [r for r in requests if r.joins <= step and not r.finished]
        segments = []
        for r in active:
            pool.grow(r.table, len(r.tokens))  # interleaved growth: tables are not consecutive
            segments.append(Segment(r.tokens[r.rows :], r.rows, r.table, 1))
        if segments:
            best = target.forward(Batch(segments)).logits.argmax(-1).tolist()
            for r, token in zip(active, best, strict=True):
                r.rows = len(r.tokens)
                r.tokens.append(token)
        step += 1
    return [r.tokens for r in requests]
