"""The calls of a group in their callers' threads and in its own, and the end of groups."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hetero.collectives.layout import Layout, Member
from hetero.collectives.links import clone
from hetero.collectives.process_group import HeteroProcessGroup
from hetero.collectives.work import SideStream
from hetero.errors import LinkError
from hetero.observe.record import recorder
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import THREE_AND_ONE, Side, run_ranks
from tests.hetero.link.joined import wait_for

SCRIPT = """
import sys
import torch, torch.distributed as dist
import hetero
from hetero.collectives import communicator

communicator.POLL_SECONDS = 0.0001
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
        dist.barrier()
        deadlines += [link.description.timeout for link in whole.links()]
        side.say(f"{number_of_group}/{side.rank}")
        for rank in range(side.size):
            side.hear(f"{number_of_group}/{rank}")
        side.options["end"]()
        del whole
        sums.append(number.item())

    def left() -> list[str]:
        """Threads. One may be in PyTorch's C++ when the process ends, and abort it."""
        gc.collect()
        names = (thread.name for thread in threading.enumerate())
        return [name for name in names if {"calls", "p2p"} & {*name.split()}]

    # Not at once where an aborted group's thread looks at its store: it ends after that.
    wait_for(lambda: not left())
    return sums, deadlines, left()


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


def test_a_destroyed_group_leaves_nothing_to_the_garbage_collector() -> None:
    """Scripts switch that off, so that no step is longer than the others."""
    for left in values(run_ranks(destroy_groups, ("nvidia", "nvidia", "amd"))):
        assert left == []


def destroy_groups(side: Side) -> list[str]:
    """The threads, files and garbage that some groups leave once they have ended."""
    gc.collect()
    gc.disable()
    dist.all_reduce(torch.ones(1))
    threads, files = threads_of_this_process(), files_of_this_process()
    for _ in range(3):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group

    def left() -> list[str]:
        return [*(threads_of_this_process() - threads), *(files_of_this_process() - files)]

    # Not once: a group that goes on polls its store in a thread that lives for a moment.
    is_as_before = wait_for(lambda: not left())
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    kinds = [type(garbage) for garbage in gc.garbage]
    garbage = [kind.__name__ for kind in kinds if kind.__module__.startswith("hetero.")]
    return garbage if is_as_before else [*garbage, *left()]


def threads_of_this_process() -> Counter[str]:
    return found_of(Path("/proc/self/task").glob("*/comm"), Path.read_text)


def files_of_this_process() -> Counter[str]:
    """The kinds of its open files."""
    return found_of(Path("/proc/self/fd").iterdir(), lambda fd: os.readlink(fd).partition(":")[0])


def found_of(entries: Iterable[Path], read: Callable[[Path], str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in entries:
        # Threads end, and files are closed, between the listing and the look.
        with suppress(FileNotFoundError, ProcessLookupError):
            found[read(entry)] += 1
    return found


def test_first_calls_of_two_threads_connect_a_gpu_once() -> None:
    built: list[torch.device] = []

    def new_communicator(_: HeteroProcessGroup, device: torch.device) -> Any:
        time.sleep(0.05)
        built.append(device)
        return SimpleNamespace(device=device)

    members = tuple(Member(r, r, "host", vendor) for r, vendor in enumerate(("nvidia", "amd")))
    with mock.patch.object(HeteroProcessGroup, "_new_communicator", new_communicator):
        group = HeteroProcessGroup(
            Layout(members, 0),
            None,
            name="0",
            store=dist.HashStore(),
            timeout=timedelta(seconds=1),
        )
        call_on_a_gpu_in_two_threads(group)
    assert built == [torch.device("cpu"), torch.device("cuda", 0)]


def call_on_a_gpu_in_two_threads(group: HeteroProcessGroup) -> None:
    gpu = torch.device("cuda", 0)
    threads = [threading.Thread(target=group._communicator_for, args=(gpu,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ROUNDS = 30


@pytest.mark.parametrize("vendors", [("nvidia", "amd"), THREE_AND_ONE], ids=["1+1", "3+1"])
def test_they_stay_in_order_whoever_is_late(vendors: tuple[str, ...]) -> None:
    for begun_by_callers in values(run_ranks(call_in_turns, vendors)):
        assert begun_by_callers > 0, "no call was begun by its caller"


def as_on_a_gpu() -> list[bool]:
    """Have calls begun by their callers here too; what their first try has come to."""
    SideStream.exists = property(lambda self: True)  # type: ignore[assignment,method-assign]
    from hetero.collectives.communicator import Communicator

    tries: list[bool] = []
    progress = Communicator._progress

    def watched(self, running, *, on_side_stream=False, blocking=True):
        is_done = progress(self, running, on_side_stream=on_side_stream, blocking=blocking)
        if not blocking:
            tries.append(is_done)
        return is_done

    Communicator._progress = watched  # type: ignore[method-assign]
    return tries


def call_in_turns(side: Side) -> int:
    tries = as_on_a_gpu()
    ranks = torch.arange(side.size)[:, None]
    for number in range(ROUNDS):
        chance = random.Random(number)
        if chance.random() < 0.3 and side.rank == number % side.size:
            time.sleep(0.002)
        sums = [
            torch.full((chance.choice([1, 1000, 100_000, 3_000_000]),), float(side.rank + number))
            for _ in range(3)
        ]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
        tables = [torch.empty(side.size * length) for length in (77, 200_000)]
        for table in tables:
            row = torch.full((table.numel() // side.size,), float(side.rank))
            works.append(dist.all_gather_into_tensor(table, row, async_op=True))
        blocking = torch.ones(5)
        dist.all_reduce(blocking)
        assert (blocking == side.size).all(), "it has overtaken those before it"
        for work in works:
            work.wait()
        total = sum(rank + number for rank in range(side.size))
        assert all((tensor == total).all() for tensor in sums), number
        assert all((table.view(side.size, -1) == ranks).all() for table in tables), number
    return len(tries)


def test_a_call_that_is_waited_for_at_once_has_no_handle_and_raises_its_error() -> None:
    ended, error = zip(*values(run_ranks(call_without_handles, ("nvidia", "amd"))), strict=True)
    assert ended == (2, 2)
    assert all("was aborted (enough)" in text for text in error)


def call_without_handles(side: Side) -> tuple[int, str]:
    """How many calls the record has as completed, and the error of a call after an abort."""
    group: Any = dist.group.WORLD
    at_once = dist.AllreduceOptions()
    at_once.asyncOp = False
    tensor = torch.ones(3)
    assert group.allreduce([tensor], at_once) is None
    # Not in the caller's thread: the group's own still has one to do.
    group._cpu_communicator._worker.submit(lambda: time.sleep(0.05))
    assert group.allreduce([tensor], at_once) is None
    assert (tensor == 4).all()
    calls = [entry for entry in recorder().last_calls() if entry.operation == "all_reduce"]
    ended = [entry for entry in calls if entry.state == "completed"]
    side.say(f"done/{side.rank}")
    side.hear(f"done/{1 - side.rank}")
    group.abort("enough")
    with pytest.raises(RuntimeError) as error:
        group.allreduce([tensor], at_once)
    return len(ended), str(error.value)


def test_a_caller_is_not_held_up_by_a_peer_that_has_not_come() -> None:
    values(run_ranks(come_late, ("nvidia", "amd")))


def come_late(side: Side) -> None:
    """Rank 1 makes its call only after rank 0's has returned."""
    tries = as_on_a_gpu()
    dist.all_reduce(torch.ones(3))
    tensor = torch.ones(1000)
    if side.rank == 1:
        side.hear("called")
    work = dist.all_reduce(tensor, async_op=True)
    if side.rank == 0:
        assert tries == [False]
        side.say("called")
    work.wait()
    assert (tensor == 2).all()


def test_a_callback_may_wait_for_the_next_calls_of_its_group() -> None:
    values(run_ranks(call_in_callbacks, ("nvidia", "amd"), patience=60.0))


def call_in_callbacks(side: Side) -> None:
    """As the communication hook of DDP's PowerSGD does. A GPU's barrier begins with a drain."""
    group = dist.group.WORLD
    assert group is not None

    def then(future: torch.futures.Future) -> torch.Tensor:
        (value,) = future.value()
        follow_up = dist.all_reduce(value.clone(), async_op=True).get_future()
        group._cpu_communicator.drain()
        dist.barrier()
        return follow_up.wait()[0]

    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    assert (works[0].get_future().then(then).wait() == side.size**2).all()
    works[1].wait()


@pytest.mark.parametrize("method", ["record_end", "wait_event"])
def test_a_gpu_that_fails_in_the_worker_ends_the_call_and_the_group(method: str) -> None:
    """Its driver then refuses all that is asked of it."""
    outcomes = run_ranks(fail_on_a_gpu, ("nvidia", "amd"), method=method, patience=60.0)
    for error in values(outcomes):
        assert "rank 1" in error
        assert "an illegal memory access" in error


def fail_on_a_gpu(side: Side) -> str:
    as_on_a_gpu()
    dist.all_reduce(torch.ones(3))
    original = getattr(SideStream, side.options["method"])

    def failing(self: SideStream, *arguments: object) -> object:
        if threading.current_thread() is threading.main_thread():
            return original(self, *arguments)
        raise RuntimeError("an illegal memory access was encountered")

    if side.rank == 1:
        setattr(SideStream, side.options["method"], failing)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        side.say("called")  # so late that it was left to the worker
    else:
        side.hear("called")
        work = dist.all_reduce(torch.ones(3), async_op=True)

    def go_on() -> None:
        work.wait()
        dist.all_reduce(torch.ones(3))

    with pytest.raises(RuntimeError) as error:
        go_on()
    return str(error.value)
