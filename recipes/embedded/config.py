"""What is trained, on how many tokens: the numbers that make the recipe reproducible."""

from dataclasses import dataclass

from tokenizer import CONTEXT, VOCAB_SIZE
from transformers import Qwen3Config

BLOCK = 512  # tokens in one packed training block; the longest context trained on
TEST_SHARE = 0.2  # chance that a test file joins one pass over the data; every other file joins every pass


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    feed_forward: int


@dataclass(frozen=True)
class Phase:
    """One run over the data from `first_block` on, with its own schedule."""

    name: str
    steps: int
    blocks_per_step: int  # of BLOCK tokens
    short_context_steps: int  # steps at half the context first: attention is over a third of a step on a CPU
    matrix_lr: float  # Muon, for the matrices inside the layers
    vector_lr: float  # AdamW, for the embedding and the norms
    warmup_steps: int
    decay_share: float  # the last share of the steps falls linearly to zero
    distil_share: float = 0.0  # weight of the target's soft distribution in the loss; the rest is the text itself
    seed: int = 0


TARGET_SHAPE = Shape(layers=12, hidden=256, feed_forward=704)
# One layer, wider inside: its pass is bound by the number of operations, not by their width.
SMALL_SHAPE = Shape(layers=1, hidden=256, feed_forward=1024)

# A third of the layers learns as much from the first tokens and costs less than half: the target starts shallow and is
# then grown to its full depth without changing what it computes.
SHALLOW_SHAPE = Shape(layers=4, hidden=256, feed_forward=704)

TARGET_SHALLOW = Phase(
    name="target-shallow",
    steps=1400,
    blocks_per_step=8,
    short_context_steps=1400,
    matrix_lr=0.02,
    vector_lr=4e-3,
    warmup_steps=20,
    decay_share=0.0,
)
TARGET = Phase(
    name="target",
    steps=560,
    blocks_per_step=8,
    short_context_steps=400,
    matrix_lr=0.02,
    vector_lr=3e-3,
    warmup_steps=20,
    decay_share=0.8,
    seed=3,
)
# The draft first reads the text alone, which is cheap, then learns the target's own distribution, which is what
# acceptance measures: 1 - TV(target, small).
SMALL_TEXT = Phase(
    name="small-text",
    steps=800,
    blocks_per_step=12,
    short_context_steps=800,
    matrix_lr=0.02,
    vector_lr=3e-3,
    warmup_steps=20,
    decay_share=0.3,
    seed=1,
)
SMALL_DISTIL = Phase(
    name="small-distil",
    steps=300,
    blocks_per_step=8,
    short_context_steps=200,
    matrix_lr=0.015,
    vector_lr=2e-3,
    warmup_steps=10,
    decay_share=0.8,
    distil_share=0.9,
    seed=2,
)


def model_config(shape: Shape) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=0,  # the end-of-text token is the first special token
        pad_token_id=None,
        dtype="bfloat16",
    )
