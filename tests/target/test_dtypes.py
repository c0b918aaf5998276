"""Dtypes by name: there and back, and a name that torch has not."""

from __future__ import annotations

import pytest
import torch

from forerun.target.dtypes import dtype_name, dtype_named


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64"])
def test_a_name_and_its_dtype(name):
    """There and back; configs of older checkpoints write torch's prefix as well."""
    dtype = dtype_named(name)
    assert dtype == dtype_named(f"torch.{name}") == getattr(torch, name)
    assert dtype_name(dtype) == name


@pytest.mark.parametrize("name", ["banana", "nn", "", "torch."])
def test_a_name_of_no_dtype_is_a_value_error(name):
    """Neither an attribute error nor whatever else torch calls so."""
    with pytest.raises(ValueError, match="torch has no dtype"):
        dtype_named(name)
