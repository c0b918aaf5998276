"""How the C library gives memory back: for training on a CPU, not at all."""

from __future__ import annotations

import ctypes
import sys

MMAP_MAX, TRIM_THRESHOLD = -4, -1
"""glibc's numbers of these options, malloc.h."""

GAPS = 0.7
"""What the heap then takes beyond the tensors of a pass, for each byte of them: blocks of other sizes do not fit into
what was freed. Measured on the embedded target, steps of 1,024 and 2,048 tokens: 0.8 eagle3, 0.8 to 1.2 dspark, 1.7
eagle, 0.2 small. A plan with 0.7 is within a quarter of all of them, the process included."""


def keep_freed_memory() -> bool:
    """Asks glibc to reuse large freed blocks instead of handing them back to the kernel after every step.

    The pages of a step's logits would be zeroed anew each time: a step of a small drafter took 1.6 times as long, most
    of it in the kernel (measured). The price is that the process keeps its peak, with `GAPS`. False where there is no
    glibc.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mapped, trimmed = mallopt(MMAP_MAX, 0), mallopt(TRIM_THRESHOLD, 2**31 - 1)
    return bool(mapped and trimmed)
