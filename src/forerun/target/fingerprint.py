"""Which target something was made for: hashes of config, weights, tokenizer and chat template.

Each is kept apart, so that a refusal can name what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.target.base import Tokenizer
from forerun.target.dtypes import dtype_name
from forerun.target.hf import HFTarget
from forerun.target.packed import PackedLinear

SAMPLES = 64
"""Numbers taken from each weight tensor."""

PASSIVE = {
    "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "name_or_path", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "problem_type", "quantization_config", "return_dict",
    "router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Config fields that do not change a forward."""

PROBE = "def f(x):\n\treturn x**2  # Größe 123,456\nЖизнь 日本語 한국어 🙂 é e\u0301  'll <|x|>"
"""A text that tokenizers of other families or other merges split differently."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Hexadecimal hashes, and the dtype for a warning."""

    config: str
    weights: str
    tokenizer: str
    chat_template: str
    dtype: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Fingerprint:
        """KeyError names a field that is missing."""
        return cls(**{name: str(fields[name]) for name in cls.__dataclass_fields__})


def fingerprint(target: HFTarget) -> Fingerprint:
    """The fingerprint of a loaded target: milliseconds, or one read of the weights where they are packed."""
    return Fingerprint(
        config=_digest(_canonical(target.model.config.get_text_config().to_dict())),
        weights=weights_hash(target.model),
        tokenizer=tokenizer_hash(target.tokenizer),
        chat_template=template_hash(target.tokenizer),
        dtype=dtype_name(target.dtype),
    )


def differences(made_for: Fingerprint, found: Fingerprint) -> list[str]:
    """Names of the parts that differ, dtype not among them: compare it yourself and warn."""
    parts = ("config", "weights", "tokenizer", "chat_template")
    return [part for part in parts if getattr(made_for, part) != getattr(found, part)]


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that change a forward, defaults filled in by transformers; private, passive and unset ones left out.

    What is None, False or empty is left out as well: a release that adds a field which is off changes no fingerprint.
    """
    kept = {k: v for k, v in config.items() if k not in PASSIVE and not k.startswith("_")}
    return {k: _canonical(v) if isinstance(v, dict) else v for k, v in kept.items() if _is_set(v)}


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {}, ())


def weights_hash(model: nn.Module) -> str:
    """Hash of some numbers of every tensor, rounded to bfloat16.

    Rounded, because the dtype must not count: a checkpoint loaded in float32, bfloat16 or float64 has one hash. (A
    float32 checkpoint loaded in float16 is rounded twice and may have another.)
    """
    hasher = hashlib.sha256()
    for name, tensor in _tensors(model):
        flat = tensor.detach().flatten()
        places = torch.linspace(0, len(flat) - 1, min(SAMPLES, len(flat)), dtype=torch.float64).long()
        values = flat[places.to(flat.device)].to(torch.bfloat16).float().cpu()
        hasher.update(f"{name} {tuple(tensor.shape)} ".encode() + values.numpy().tobytes())
    return hasher.hexdigest()[:32]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating parameters in the order of their names; packed ones in their plain layout, one at a time."""
    for name, module in sorted(model.named_modules(remove_duplicate=False), key=lambda item: item[0]):
        own = dict(module.named_parameters(recurse=False))
        packed = {"weight"} if isinstance(module, PackedLinear) else set()
        for key in sorted(own.keys() | packed):
            tensor = module.get_parameter(key) if key in own else module.weight
            if tensor.is_floating_point() and tensor.numel():
                yield f"{name}.{key}", tensor


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """The part of a fingerprint that says whether two tokenizers give the same ids."""
    return _digest([sorted(tokenizer.vocabulary().items()), sorted(tokenizer.special_ids), tokenizer.encode(PROBE)])


def template_hash(tokenizer: Tokenizer) -> str:
    """The part of a fingerprint that says whether two chat templates are one text."""
    return _digest(tokenizer.chat_template)
