"""How many KV blocks an engine gets."""

from __future__ import annotations

import psutil
import torch

from forerun.engine.admission import Limits
from forerun.errors import OptionError
from forerun.target.base import Target
from forerun.target.blocks import blocks_for

SHARE_OF_FREE_MEMORY = 0.25
"""Of what is free after loading. On a CPU pages are only taken as blocks are written: a bound, not a cost."""


def num_blocks_for(limits: Limits, bytes_per_block: int, target: Target) -> int:
    """Blocks for all storages together: what was asked for, else what a full batch of full windows could use, bounded
    by a share of the free memory.

    Raises:
        OptionError: kv_cache_memory_bytes does not hold one block.
    """
    useful = limits.max_num_seqs * (blocks_for(target.window) + 1)
    if limits.kv_cache_memory_bytes is None:
        affordable = int(SHARE_OF_FREE_MEMORY * free_memory(target.device)) // max(1, bytes_per_block)
        return max(1, min(useful, affordable))
    blocks = limits.kv_cache_memory_bytes // max(1, bytes_per_block)
    if blocks < 1:
        raise OptionError(
            "kv_cache_memory_bytes", f"{limits.kv_cache_memory_bytes} is less than one block ({bytes_per_block} bytes)"
        )
    return min(blocks, useful)


def free_memory(device: torch.device) -> int:
    """Bytes free on the device right now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
