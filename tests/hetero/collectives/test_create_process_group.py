"""A group is built on all of its ranks or on none, which are told why."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.collectives import create_process_group
from hetero.startup import identity
from tests.forked_ranks import values
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
    assert re.search("rank 1 on [^ ]+ has ended, or has left the group", outcome.value)


def build_where_rank_1_dies(side: Side) -> str:
    def die(*_: Any) -> None:
        side.say("end/1")
        os.kill(os.getpid(), signal.SIGKILL)

    if side.rank == 1:
        create_process_group._mixed_group = die
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


def test_what_a_rank_that_died_had_told_is_told_though_it_could_not_count_itself():
    store, timeout = dist.HashStore(), timedelta(seconds=60)
    store.set("identity/1", '{"vendor": "amd"}')
    own = create_process_group._Rendezvous(
        store, rank=0, size=2, global_ranks=[0, 1], timeout=timeout
    )
    assert own._all_gather("identity", {"vendor": "cpu"})[1] == {"vendor": "amd"}
