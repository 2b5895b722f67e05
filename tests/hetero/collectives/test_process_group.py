"""How groups are created, on all of their ranks or on none, split, and called directly.

PyTorch splits groups only where there is an accelerator to which the default group is bound. The
ranks here are told that the CPU is one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hetero.collectives import identities
from hetero.collectives.layout import Layout, Member
from hetero.collectives.process_group import HeteroProcessGroup
from hetero.startup import identity
from hetero.startup.store import BoundedStore
from tests.forked_ranks import values
from tests.hetero.collectives import references as ref
from tests.hetero.collectives.ranks import TWO_AND_TWO, Side, open_group, run_ranks


def be_of_an_unknown_vendor() -> None:
    os.environ["HETERO_VENDOR"] = "unheard-of"


def be_of_another_version() -> None:
    identity.__version__ = "0.0.7"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (be_of_an_unknown_vendor, r"rank 2 on [^ ]+: HETERO_VENDOR='unheard-of'"),
        (
            be_of_another_version,
            r"ranks 0-1, 3 [^;]*: 0\.1\.0, sources [0-9a-f]{8}; rank 2 [^;]*: 0\.0\.7, sources",
        ),
    ],
)
def test_a_group_that_one_rank_cannot_build_is_built_by_none(change, told):
    outcomes = run_ranks(build_where_rank_2_differs, TWO_AND_TWO, backend=None, change=change)
    for text in values(outcomes):
        assert re.search(told, text), text


def build_where_rank_2_differs(side: Side) -> str:
    if side.rank == 2:
        side.options["change"]()
    try:
        open_group(side, seconds=30)
    except Exception as error:
        return str(error)
    return "nothing"


def test_who_dies_while_the_first_group_is_built_is_named_long_before_the_timeout():
    outcome, died = run_ranks(build_where_rank_1_dies, ("nvidia", "amd"), backend=None)
    assert died.exit_code == -signal.SIGKILL
    assert re.search("rank 1 on [^ ]+ has exited or left the group", outcome.value)


def build_where_rank_1_dies(side: Side) -> str:
    def die(*_: Any, **__: Any) -> None:
        side.say("end/1")
        os.kill(os.getpid(), signal.SIGKILL)

    if side.rank == 1:
        HeteroProcessGroup.__init__ = die  # type: ignore[method-assign]
    try:
        open_group(side)
    except Exception as error:
        return str(error)
    return "nothing"


def test_a_name_that_groups_of_other_members_had_before_is_used_again():
    for sums in values(run_ranks(build_again_under_the_same_names, TWO_AND_TWO, backend=None)):
        assert sums == [2.0, 4.0, 2.0]


def build_again_under_the_same_names(side: Side) -> list[float]:
    """PyTorch counts groups from 0 again once the default group was destroyed."""
    sums = []
    for size in (2, side.size, 2):
        open_group(side, seconds=30)
        group, _ = dist.new_subgroups(size)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        sums.append(total.item())
        dist.destroy_process_group()
    return sums


def test_rank_that_exits_after_submitting_does_not_fail_the_creation():
    store = dist.HashStore()
    options = SimpleNamespace(group_size=2, timeout=timedelta(seconds=60))

    def exchange(rank: int, store: Any) -> list[dict[str, Any]]:
        options.group_rank = rank
        return identities._exchange(
            store, "values", options, {"n": rank}, name_members=str, require_alive=lambda _: None
        )

    with (
        mock.patch.object(BoundedStore, "add", side_effect=KeyboardInterrupt, create=True),
        pytest.raises(KeyboardInterrupt),
    ):
        exchange(1, store)
    assert exchange(0, store) == [{"n": 0}, {"n": 1}]


@contextlib.contextmanager
def _cpu_as_accelerator() -> Iterator[None]:
    cpu = torch.device("cpu", 0)
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = cpu
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=cpu),
    ):
        yield


def split_and_reduce(side: Side) -> dict[str, object]:
    found: dict[str, object] = {}
    with _cpu_as_accelerator():
        for name, split_ranks in (
            ("across", [[0, 2], [1, 3]]),
            ("inside", [[0, 1], [2, 3]]),
            ("some", [[1, 2, 3]]),
            ("again", [[0, 2], [1, 3]]),
        ):
            group = dist.split_group(split_ranks=split_ranks)
            if group is None:
                found[name] = None
                continue
            tensor = torch.tensor([10.0**side.rank])
            dist.all_reduce(tensor, group=group)
            found[name] = (tensor.item(), dist.get_process_group_ranks(group))
            if name == "across":
                half = dist.split_group(group, split_ranks=[[0], [1]])
                found["part of a part"] = dist.get_process_group_ranks(half)
                dist.destroy_process_group(group)
    return found


def test_parts_of_a_group_are_groups_inside_and_across_vendors() -> None:
    by_rank = values(run_ranks(split_and_reduce, TWO_AND_TWO))
    for rank, found in enumerate(by_rank):
        across = (101.0, [0, 2]) if rank in (0, 2) else (1010.0, [1, 3])
        assert found["across"] == found["again"] == across
        assert found["inside"] == ((11.0, [0, 1]) if rank < 2 else (1100.0, [2, 3]))
        assert found["some"] == (None if rank == 0 else (1110.0, [1, 2, 3]))
        assert found["part of a part"] == [rank]


def split_wrongly(side: Side) -> list[object]:
    """What wrong splits and a right one after them come to; nobody waits for a rank in vain."""
    found: list[object] = []
    with _cpu_as_accelerator():
        for split_ranks in ([[0, 7], [1, 2]], [[-1, 3]], [[0, 2], [1, 1]], [[0, 3], []], [[0, 3]]):
            try:
                group = dist.split_group(split_ranks=split_ranks)
                found.append(group and dist.get_process_group_ranks(group))
            except ValueError as error:
                found.append(str(error))
    return found


def test_a_part_with_ranks_that_do_not_exist_is_refused_and_later_ones_are_built() -> None:
    by_rank = values(run_ranks(split_wrongly, TWO_AND_TWO, patience=60))
    refusal = "split_group: the ranks [0, 7] must be ranks of a group of 4 ranks: some of 0 to 3"
    assert by_rank[0][0] == by_rank[3][0] == f"{refusal}, each once"
    assert by_rank[1][0] == by_rank[2][0] == [1, 2]
    assert all("the ranks [-1, 3] must be ranks of" in found[1] for found in by_rank)
    assert by_rank[0][2] == by_rank[2][2] == [0, 2]
    assert all("duplicate ranks" in by_rank[rank][2] for rank in (1, 3))
    assert [found[4] for found in by_rank] == [[0, 3], None, None, [0, 3]]


def bind_and_part(side: Side) -> list[float]:
    """A default group that is bound to a GPU by `device_id`, and a part of it by `new_group`."""
    gpu = torch.device("cuda", side.rank)
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=gpu),
        mock.patch("torch.accelerator.device_count", return_value=side.size),
    ):
        dist.init_process_group(
            "hetero", store=side.store, rank=side.rank, world_size=side.size, device_id=gpu
        )
    part = dist.new_group([0, 1])
    tensors = [torch.ones(1), torch.ones(1)]
    dist.all_reduce(tensors[0])
    if side.rank < 2:
        dist.all_reduce(tensors[1], group=part)
    return [tensor.item() for tensor in tensors]


def test_a_group_that_is_bound_to_a_device_has_parts_that_leave_ranks_out() -> None:
    by_rank = values(run_ranks(bind_and_part, ("nvidia", "amd", "amd"), backend=None))
    assert by_rank == [[3.0, 2.0], [3.0, 2.0], [3.0, 1.0]]


def test_a_group_takes_one_tensor_and_a_reduction_a_root_or_a_timeout_for_options():
    values(run_ranks(call_without_options, ("nvidia", "amd")))


def call_without_options(side: Side) -> None:
    group: Any = dist.group.WORLD
    op, patience, root = dist.ReduceOp.MAX, timedelta(seconds=60), side.size - 1
    inputs = [ref.given(rank, (3,), torch.float64, seed=80) for rank in range(side.size)]
    mine, largest = inputs[side.rank], ref.reduced("MAX", inputs)
    table = [mine + rank for rank in range(side.size)]
    for how, timeout in (((), {}), ((patience,), {}), ((), {"timeout": patience})):
        total, copied, least, part = (mine.clone() for _ in range(4))
        blank = [torch.zeros_like(mine) for _ in inputs]
        works = [
            group.allreduce(total, op, *how, **timeout),
            group.broadcast(copied, root, *how, **timeout),
            group.reduce(least, root, op, *how, **timeout),
            group.reduce_scatter(part, table, op, *how, **timeout),
            group.allgather(blank, mine, *how, **timeout),
            group.barrier(*how, **timeout),
        ]
        for work in works:
            work.wait()
        assert_same([total, copied, *blank], [largest, inputs[root], *inputs], "of a group")
        assert_same([part], [largest + side.rank], "reduce_scatter of a group")
        assert_same([least], [largest if side.rank == root else mine], "reduce of a group")
        gathered = [torch.zeros_like(mine) for _ in inputs] if side.rank == root else []
        group.gather(gathered, mine, root, *how, **timeout).wait()
        group.scatter(part, gathered, root, *how, **timeout).wait()
        assert_same([part], [mine], "gather and scatter of a group")
    total, copied = mine.clone(), mine.clone()
    group.allreduce([total], op=op).wait()
    group.broadcast(copied, root=0).wait()
    assert_same([total, copied], [largest, inputs[0]], "by name")


def test_a_timeout_of_one_call_is_refused_on_a_gpu_unless_it_is_that_of_the_group() -> None:
    gpu = mock.MagicMock(type="cuda")
    gpu.__ne__.return_value = False
    communicator = mock.Mock(device=gpu, timeout=60.0)
    members = tuple(Member(r, r, "host", vendor) for r, vendor in enumerate(("nvidia", "amd")))
    with mock.patch.object(HeteroProcessGroup, "_new_communicator", return_value=communicator):
        group: Any = HeteroProcessGroup(
            Layout(members, 0),
            None,
            name="0",
            store=dist.HashStore(),
            timeout=timedelta(seconds=60),
        )
    with pytest.raises(ValueError, match=r"broadcast: a timeout of 5 s .* the group's, 60 s, with"):
        group.broadcast([torch.ones(1)], 0, timedelta(seconds=5))
    assert not communicator.run.called
    group.broadcast([torch.ones(1)], 0, timedelta(seconds=60))
    assert communicator.run.call_args.kwargs["timeout"] == 60.0


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other), what


BRIEFLY = timedelta(seconds=0.2)


class Barriers:
    """The monitored barriers of one rank of a group of 4."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        layout = SimpleNamespace(rank=rank, size=4)
        self._group: Any = SimpleNamespace(_store=store, _layout=layout, _monitored_barriers=0)

    def wait(self, timeout: timedelta, *, wait_all_ranks: bool = False) -> None:
        HeteroProcessGroup.monitored_barrier(self._group, timeout, wait_all_ranks)


def test_all_ranks_pass_together_and_again() -> None:
    store = dist.HashStore()
    barriers = [Barriers(store, rank) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            waits = [pool.submit(one.wait, timedelta(seconds=20)) for one in barriers]
            for wait in waits:
                wait.result()


@pytest.mark.parametrize(
    ("wait_all_ranks", "message"),
    [
        (False, "Rank 2 failed to pass monitoredBarrier in 0:00:00.2"),
        (True, "Ranks 2, 3 failed to pass monitoredBarrier in 0:00:00.2"),
    ],
)
def test_missing_ranks_are_named(wait_all_ranks: bool, message: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        present = pool.submit(Barriers(store, 1).wait, BRIEFLY)
        with pytest.raises(RuntimeError, match=message):
            Barriers(store, 0).wait(BRIEFLY, wait_all_ranks=wait_all_ranks)
        with pytest.raises(RuntimeError, match="Rank 1 successfully reached monitoredBarrier"):
            present.result()


def test_a_rank_0_without_time_says_so_and_blames_nobody() -> None:
    with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0:00:00"):
        Barriers(dist.HashStore(), 0).wait(timedelta(0))
