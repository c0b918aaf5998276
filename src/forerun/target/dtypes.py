"""Dtypes by name, as options, configs and reports write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PREFIX = "torch."


def dtype_name(dtype: torch.dtype) -> str:
    """Of a dtype, without torch's prefix: `bfloat16`."""
    return str(dtype).removeprefix(_PREFIX)


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name, which may have torch's prefix. ValueError: torch has none of that name."""
    import torch

    found = getattr(torch, name.removeprefix(_PREFIX), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found
