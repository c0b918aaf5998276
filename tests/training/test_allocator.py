"""Freed memory stays with a training process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, torch
from forerun.training.allocator import keep_freed_memory
assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):  # until the heap is large enough
    torch.ones(1 << 22)
before = faults()
for _ in range(32):
    torch.ones(1 << 22)
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's options")
def test_large_blocks_are_used_again_without_new_pages():
    """Of 32 tensors of 16 MiB, one after the other, most touch pages that were touched: all 4,096 would be new else."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 * 4096 / 4
