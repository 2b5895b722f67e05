"""Which GPU a test's rank has: where there are fewer than ranks, several ranks share one.

Links need no GPU of their own. NCCL does, so ranks of one vendor never share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gpu_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % torch.cuda.device_count())


def gpus_for(vendors: Sequence[str]) -> int:
    """The fewest with which `gpu_of` gives no GPU to two ranks of one vendor."""
    return next(count for count in range(1, len(vendors) + 1) if _suffices(count, vendors))


def _suffices(count: int, vendors: Sequence[str]) -> bool:
    taken = [(vendor, rank % count) for rank, vendor in enumerate(vendors)]
    return len(set(taken)) == len(taken)
