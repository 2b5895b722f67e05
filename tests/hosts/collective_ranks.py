"""One rank of a script that says backend="nccl": random calls over random groups, part by part.

Says when each part is done, and in the end the digest of what every rank has alike, and of how many
ranks rank 0 has a record. After the first part it waits for a file, if one is named.
"""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hetero.collectives.world import own_world
from tests.hetero.collectives.ranks import Side
from tests.hetero.collectives.test_sequences import walk

LARGE = 1 << 20


def main(parts: int, seconds: int = 60, go: Path | None = None) -> None:
    dist.init_process_group("nccl", timeout=timedelta(seconds=seconds))
    rank, size = dist.get_rank(), dist.get_world_size()
    digest = hashlib.sha256()
    for part in range(parts):
        options = {"calls": 24, "groups": 3, "seed": part}
        walk(Side(rank, size, dist.HashStore(), options))
        large = torch.randn(LARGE, generator=torch.Generator().manual_seed(rank + part))
        dist.all_reduce(large)
        digest.update(large.numpy().tobytes())
        if rank == 0:
            print(f"part {part} is done", flush=True)
        while go is not None and not go.exists():
            time.sleep(0.05)
    print(f"rank {rank} ends with {digest.hexdigest()}", flush=True)
    if rank == 0:
        print(f"rank 0 has records of {records(size)} ranks", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def records(size: int) -> int:
    """Of how many ranks rank 0 has one, as soon as it is of all."""
    world = own_world()
    assert world is not None
    assert world.collector is not None
    deadline = time.monotonic() + 30
    while len(world.collector.seen()) < size and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(world.collector.seen())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *map(Path, sys.argv[3:]))
