"""`split_group` of a group that crosses vendors.

PyTorch splits groups only where there is an accelerator to which the default group is bound. The
ranks here are told that the CPU is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from tests.forked_ranks import values
from tests.hetero.collectives.ranks import TWO_AND_TWO, Side, run_ranks


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
    refusal = "split_group: the ranks [0, 7] are no part of a group of 4 ranks; give some of 0 to 3"
    assert by_rank[0][0] == by_rank[3][0] == f"{refusal}, each once"
    assert by_rank[1][0] == by_rank[2][0] == [1, 2]
    assert all("the ranks [-1, 3] are no part" in found[1] for found in by_rank)
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
