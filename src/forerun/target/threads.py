"""How many CPU threads torch computes with."""

from __future__ import annotations

from forerun.errors import OptionError
from forerun.sampling.options import check_whole

MOST_THREADS = 1024
"""More than any machine has cores. Far more are not refused by torch: it fails to start them later, in the middle of
whatever happens to compute first."""


def use_threads(threads: int | None) -> None:
    """CPU threads of torch, for the whole process; None leaves its default. OptionError: it is no number of threads."""
    if threads is None:
        return
    check_whole("--threads", threads)
    if not 1 <= threads <= MOST_THREADS:
        raise OptionError("--threads", f"must be in 1 .. {MOST_THREADS}, got {threads}")
    import torch

    torch.set_num_threads(int(threads))


__all__ = ["MOST_THREADS", "use_threads"]
