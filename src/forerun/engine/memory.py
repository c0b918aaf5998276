"""How many KV blocks an engine gets."""

from __future__ import annotations

from forerun.engine.admission import Limits
from forerun.errors import OptionError
from forerun.target.base import Target
from forerun.target.blocks import blocks_for
from forerun.target.checkpoint import available_memory

SHARE_OF_FREE_MEMORY = 0.25
"""Of what is free after loading. On a CPU pages are only taken as blocks are written: a bound, not a cost. A prefix
cache comes to it in time, since it uses blocks that were never written before those it would have to forget."""


def num_blocks_for(limits: Limits, bytes_per_block: int, target: Target) -> int:
    """Blocks for all storages together: what was asked for, else what a full batch of full windows could use, bounded
    by a share of the free memory.

    Raises:
        OptionError: kv_cache_memory_bytes does not hold one block, or there is less memory than that.
    """
    useful = limits.max_num_seqs * (blocks_for(target.window) + 1)
    if limits.kv_cache_memory_bytes is None:
        affordable = int(SHARE_OF_FREE_MEMORY * available_memory(target.device)) // max(1, bytes_per_block)
        return max(1, min(useful, affordable))
    blocks = limits.kv_cache_memory_bytes // max(1, bytes_per_block)
    if blocks < 1:
        raise OptionError(
            "kv_cache_memory_bytes", f"{limits.kv_cache_memory_bytes} is less than one block ({bytes_per_block} bytes)"
        )
    blocks = min(blocks, useful)
    free = available_memory(target.device)
    if blocks * bytes_per_block > free:  # on a CPU the pages are taken as they are written: it would be killed later
        raise OptionError(
            "kv_cache_memory_bytes",
            f"{blocks} KV blocks x {bytes_per_block} bytes = {blocks * bytes_per_block / 1e9:.2f} GB, and "
            f"{free / 1e9:.2f} GB are free on {target.device} beside the weights; lower it",
        )
    return blocks
