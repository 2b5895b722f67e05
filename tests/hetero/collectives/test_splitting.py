"""`split_group` of a group that crosses vendors.

PyTorch splits groups only where there is an accelerator to which the default group is bound. The
ranks here are told that the CPU is one.
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from tests.forked_ranks import values
from tests.hetero.collectives.ranks import TWO_AND_TWO, Side, run_ranks


def split_and_reduce(side: Side) -> dict[str, object]:
    cpu = torch.device("cpu", 0)
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = cpu
    found: dict[str, object] = {}
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=cpu),
    ):
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


def split_source_of_a_bound_group(side: Side) -> list[object]:
    sources = []
    for device_type in ("cpu", "cuda"):
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = torch.device(device_type, 0)
        sources.append(dist.distributed_c10d._get_split_source(dist.group.WORLD))
    return sources


def test_subgroups_of_a_group_that_is_bound_to_a_device_are_built_anew() -> None:
    """NCCL could take none of ours to split from, and gloo takes none."""
    assert values(run_ranks(split_source_of_a_bound_group, TWO_AND_TWO)) == [[None, None]] * 4


def bind(side: Side) -> float:
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.eager_connect_single_device(torch.device("cpu"))
    tensor = torch.tensor([10.0**side.rank])
    dist.all_reduce(tensor)
    return tensor.item()


def test_a_group_may_be_bound_to_a_device_before_its_first_call() -> None:
    assert values(run_ranks(bind, TWO_AND_TWO)) == [1111.0] * 4
