"""Flags of other engines, and what to type here instead."""

from __future__ import annotations

_MODEL = "here it is --drafter (or --speculative-config.model)"
_METHOD = "here it is --drafter (or --speculative-config.method)"
_COUNT = "here it is --num-speculative-tokens"
_LOSSY = "refused: accepting by a threshold would change the output; verification here is always exact"
_LENGTH = "here it is --max-model-len"
_NEW_TOKENS = "here it is --max-tokens"
_CONFIDENCE = (
    "here it is --speculative-config.confidence_threshold, compared with the chance that token k is accepted as it is "
    "known before the token is drawn: cutting by the drawn token's own probability would change the output"
)
_ONE_DEVICE = "not built: a model is on one device, --device"
_GOES_ON = "the same command goes on where it was stopped; --restart begins anew"
_STEP = "here it is --tokens-per-step, counted in tokens; what does not fit is parted by itself (--micro-batch-tokens)"
_TREE = "drafts are chains here: top-k is 1 and the number of steps is --num-speculative-tokens"

FLAGS = {
    # SGLang, LMDeploy
    "--speculative-algorithm": _METHOD,
    "--speculative-draft-model-path": _MODEL,
    "--speculative-draft-model": _MODEL,
    "--speculative-num-draft-tokens": "here it is --num-speculative-tokens, one less: SGLang counts the anchor",
    "--speculative-num-steps": _TREE,
    "--speculative-eagle-topk": _TREE,
    "--speculative-accept-threshold-single": _LOSSY,
    "--speculative-accept-threshold-acc": _LOSSY,
    "--speculative-dspark-confidence-threshold": _CONFIDENCE,
    "--speculative-dspark-sps-table-path": "here it is --speculative-config.confidence_cost_table_path",
    "--speculative-dspark-confidence-sts-path": "here it is --speculative-config.confidence_calibration_path",
    "--context-length": _LENGTH,
    "--model-path": "here it is --target",
    "--mem-fraction-static": "here it is --kv-cache-memory-bytes",
    # llama.cpp
    "-md": _MODEL,
    "--model-draft": _MODEL,
    "--spec-draft-model": _MODEL,
    "-hfd": _MODEL,
    "--spec-type": _METHOD,
    "--spec-draft-n-max": _COUNT,
    "--draft-max": _COUNT,
    "--draft": _COUNT,
    "--spec-draft-n-min": "here it is --speculative-config.min_draft",
    "--draft-min": "here it is --speculative-config.min_draft",
    "--spec-draft-p-min": _CONFIDENCE,
    "--draft-p-min": _CONFIDENCE,
    "--n-predict": _NEW_TOKENS,
    "--predict": _NEW_TOKENS,
    "--ctx-size": _LENGTH,
    "--temp": "here it is --temperature",
    "--repeat-penalty": "here it is --repetition-penalty",
    "--file": "here it is --prompt @FILE",
    "--n-gpu-layers": "here it is --device; a model is on one device as a whole",
    # TensorRT-LLM
    "--decoding-type": _METHOD,
    "--max-draft-len": _COUNT,
    "--speculative-model": _MODEL,
    "--draft-len-schedule": "here it is --speculative-config.num_speculative_tokens_per_batch_size",
    # transformers
    "--assistant-model": _MODEL,
    "--num-assistant-tokens": _COUNT,
    "--prompt-lookup-num-tokens": "here it is --drafter ngram --num-speculative-tokens",
    "--max-matching-ngram-size": "here it is --speculative-config.prompt_lookup_max",
    "--assistant-confidence-threshold": _CONFIDENCE,
    "--num-assistant-tokens-schedule": "here it is --policy; constant is fixed",
    "--max-new-tokens": _NEW_TOKENS,
    "--min-new-tokens": "here it is --min-tokens",
    "--do-sample": "sampling is on unless --temperature 0",
    # vLLM
    "--draft-model": _MODEL,
    "--ngram-prompt-lookup-max": "here it is --speculative-config.prompt_lookup_max",
    "--gpu-memory-utilization": "here it is --kv-cache-memory-bytes",
    "--rejection-sample-method": "here it is --verify-mode",
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "--kv-cache-dtype": "keys and values are kept in --dtype",
    # mlx-dspark, mlx-lm
    "--max-draft": _COUNT,
    "--num-draft-tokens": _COUNT,
}

TRAINING = {
    # transformers, SpecForge
    "--resume": _GOES_ON,
    "--resume-from-checkpoint": _GOES_ON,
    "--output-dir": "here it is --out",
    "--target-model-path": "here it is --target",
    "--train-data-path": "here it is --data",
    "--lr": "here it is --learning-rate",
    "--batch-size": _STEP,
    "--per-device-train-batch-size": _STEP,
    "--gradient-accumulation-steps": _STEP,
    "--bf16": "here it is --mixed-precision bf16",
    "--fp16": "here it is --mixed-precision fp16",
}
"""Of other trainers; some of these names mean something else beside an engine."""


def translate(flag: str, command: str = "") -> str | None:
    """What to type here, at a command, for a flag of another engine or trainer; None if it is not one."""
    name = flag.replace("_", "-")
    return (TRAINING.get(name) if command == "train" else None) or FLAGS.get(name)
