"""The plan of a machine that is not here: a five-layer `dspark` for an 8B target on eight GPUs.

The target's measures are Qwen3-8B's: 36 layers of 4,096 columns, 8 KV heads of 128.
"""

from __future__ import annotations

from forerun.drafters.dflash.memory import BlockPass, block_memory
from forerun.drafters.layers import LayerConfig
from forerun.drafters.learned.memory import fit_of_states
from forerun.training.plan import CUDA_CONTEXT, UTILISATION, Workload


def _eight_billion() -> Workload:
    work = BlockPass(
        layer=LayerConfig(
            model_type="qwen3", hidden_size=4096, intermediate_size=12_288, num_hidden_layers=5,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, hidden_act="silu",
            attention_bias=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            max_position_embeddings=40_960,
        ),
        lengths=[4096] * 4,
        anchors=512,
        block_size=7,
        drafts=7,
        features=5 * 4096,
        feature_itemsize=2,
        teacher_columns=151_936,
        draft_vocab_size=151_936,
        head_bytes=8 * 256 + 4 * (4096 + 2 * 256),
    )  # fmt: skip
    parameters, tokens = 1_130_000_000, sum(work.lengths)
    return Workload(
        target_parameters=8_190_000_000,
        target_itemsize=2,
        drafter_parameters=parameters,
        saved_itemsize=2,
        hidden_size=4096,
        states=6,
        vocab_size=work.teacher_columns,
        draft_vocab_size=work.draft_vocab_size,
        kv_bytes=147_456,
        kv_tokens=4096,
        moments=2 * parameters,
        held=block_memory(work, half=True),
        data_tokens=1_240_000_000,
        steps=14_191,
        tokens_per_step=524_288,
        pass_tokens=tokens,
        ranks=8,
        keep=2,
        rows_per_token=work.slots / tokens,
        half=True,
        process=CUDA_CONTEXT,
        start=fit_of_states(work.features, 4096, work.draft_vocab_size),
    )


EIGHT_BILLION = _eight_billion()
"""Six passes over 1.24e9 tokens, as many as DeepSpec's set has, in steps of 524,288 tokens: samples of 4,096 tokens,
512 anchors in each."""
FLOPS = UTILISATION * 989e12
"""An H100's dense bfloat16 rate by its data sheet, times the utilisation."""
