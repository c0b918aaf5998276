"""Freed memory stays with a process that trains or decodes on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUPS = {
    "asked": "from forerun.target.allocator import keep_freed_memory; assert keep_freed_memory()",
    "engine": "import forerun; engine = forerun.Engine.load('embedded')",
}
CODE = """
import resource, torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):  # until the heap is large enough
    torch.ones(1 << 24)
before = faults()
for _ in range(16):
    torch.ones(1 << 24)
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's options")
@pytest.mark.parametrize("setup", SETUPS)
def test_large_blocks_are_used_again_without_new_pages(setup):
    """Of 16 tensors of 64 MiB, one after the other, most touch pages that were touched: all 16,384 would be new else.
    glibc itself keeps no block above 32 MiB, which is less than the law of 64 requests over a large vocabulary."""
    code = SETUPS[setup] + CODE
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * 16384 / 4
