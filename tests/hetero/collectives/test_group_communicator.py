"""The end of groups, and of a process that has some."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hetero.collectives.group_links import clone
from hetero.collectives.process_group_base import HeteroProcessGroupBase
from hetero.collectives.vendor_layout import Layout, Member
from hetero.errors import LinkError
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, run_ranks

SCRIPT = """
import sys
import torch, torch.distributed as dist
import hetero
from hetero.collectives import group_communicator

group_communicator.POLL_SECONDS = 0.0001
hetero.register()
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("hetero", store=store, rank=int(sys.argv[2]), world_size=2)
for group in [dist.new_group() for _ in range(4)]:
    dist.all_reduce(torch.ones(2), group=group)
if dist.get_rank() == 1:
    dist.recv(torch.empty(1), group=group)
else:
    dist.send(torch.ones(1), dst=1, group=group)
    dist.irecv(torch.empty(1), group=group)  # from any rank; none sends
"""


def test_a_script_may_end_without_destroying_its_groups(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(rank)],
            env=os.environ | {"HETERO_VENDOR": vendor, "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, vendor in enumerate(("nvidia", "amd"))
    ]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert [code for _, code in ends] == [0, 0], ends


def make_the_default_group_twice(side: Side) -> tuple[list[float], list[float], list[str]]:
    sums, deadlines = [], []
    for number_of_group in range(2):
        dist.init_process_group("hetero", store=side.store, rank=side.rank, world_size=side.size)
        whole, number = dist.group.WORLD, torch.ones(1)
        assert whole is not None
        dist.all_reduce(number)
        if side.rank == 0:
            dist.send(number, dst=2)
        elif side.rank == 2:
            dist.recv(number, src=0)
        whole.set_timeout(timedelta(seconds=9))
        deadlines += [link.description.timeout for link in whole.links()]
        dist.barrier()
        side.say(f"{number_of_group}/{side.rank}")
        for rank in range(side.size):
            side.hear(f"{number_of_group}/{rank}")
        side.options["end"]()
        del whole
        sums.append(number.item())
    gc.collect()
    # One that is left may be in PyTorch's C++ when the process ends, and abort it.
    left = [
        thread.name for thread in threading.enumerate() if {"calls", "p2p"} & {*thread.name.split()}
    ]
    return sums, deadlines, left


@pytest.mark.parametrize("end", [dist.destroy_process_group, c10d._abort_process_group])
def test_a_group_is_made_again_with_the_store_of_one_that_has_ended(end: Any) -> None:
    """A launcher's processes keep their store, where the keys of the first group still are."""
    ranks = run_ranks(make_the_default_group_twice, ("amd", "amd", "nvidia"), backend=None, end=end)
    for sums, deadlines, threads_left in values(ranks):
        assert sums == [3.0, 3.0]
        assert deadlines
        assert set(deadlines) == {9.0}
        assert threads_left == []


def test_a_store_whose_host_has_ended_is_told_at_once() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    del host
    with pytest.raises(LinkError, match="the process that hosts the store"):
        clone(client)


def test_a_fork_that_destroys_its_groups_leaves_those_of_its_rank() -> None:
    assert values(run_ranks(destroy_in_a_fork, ("nvidia", "amd"))) == [3.0, 3.0]


def destroy_in_a_fork(side: Side) -> float:
    number = torch.tensor(side.rank + 1.0)
    dist.barrier()
    if side.rank == 0:
        if (child := os.fork()) == 0:
            try:
                dist.destroy_process_group()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        side.say("destroyed")
        time.sleep(0.5)  # The other rank then waits, and sees whether its peer has gone.
    side.hear("destroyed")
    dist.all_reduce(number)
    return number.item()


def test_a_destroyed_group_leaves_nothing_until_garbage_is_collected() -> None:
    """Scripts switch that off, so that no step is longer than the others."""
    for before, after, left in values(run_ranks(destroy_groups, ("nvidia", "nvidia", "amd"))):
        assert after <= before, "threads"
        assert left == 0, "and what holds the connections to the store"


def destroy_groups(side: Side) -> tuple[int, int, int]:
    """Threads before some groups, and after them once those that end have ended; and how many
    communicators are left."""
    communicators = []
    gc.disable()
    dist.all_reduce(torch.ones(1))
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        communicators += [weakref.ref(one) for one in group._communicators]
        del group
    deadline = time.monotonic() + 10.0
    while (after := len(os.listdir("/proc/self/task"))) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, after, sum(reference() is not None for reference in communicators)


def test_first_calls_of_two_threads_connect_a_gpu_once() -> None:
    built: list[torch.device] = []

    def new_communicator(device: torch.device) -> Any:
        time.sleep(0.05)
        built.append(device)
        return SimpleNamespace(device=device)

    members = tuple(Member(r, r, "host", vendor) for r, vendor in enumerate(("nvidia", "amd")))
    presence: Any = None
    group = HeteroProcessGroupBase(
        Layout(members, 0),
        presence,
        name="0",
        store=dist.HashStore(),
        new_communicator=new_communicator,
        timeout=timedelta(seconds=1),
    )
    gpu = torch.device("cuda", 0)
    threads = [threading.Thread(target=group._communicator_for, args=(gpu,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [torch.device("cpu"), gpu]
