"""Data parallelism with unequal shares of the batch, for any script with DDP or FSDP2."""

from hetero.data.balance import Balance, vendor_of_each_rank
from hetero.data.sampler import ShareBatchSampler, ShareSampler, loss_weight
from hetero.data.shares import Shares, speeds_of_ranks
from hetero.data.slowdown import slow_down

__all__ = [
    "Balance",
    "ShareBatchSampler",
    "ShareSampler",
    "Shares",
    "loss_weight",
    "slow_down",
    "speeds_of_ranks",
    "vendor_of_each_rank",
]
