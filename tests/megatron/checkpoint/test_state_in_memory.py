"""State in memory is refused, with figures, where it would not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import UserError
from megatron.hetero.checkpoint.snapshot import SPARED_BYTES
from megatron.hetero.checkpoint.state_in_memory import (
    RankNeed,
    require_room,
    require_state_folder,
)
from tests.sentences import sentence_of

GIB = 1 << 30


def need(
    host: str, *, vendor: str = "amd", size: int = GIB, free: int, copies: int = 1
) -> RankNeed:
    return RankNeed(host, "/dev/shm/x", vendor, size, copies, free + SPARED_BYTES)


def test_three_generations_and_a_copy_of_every_rank_have_to_fit() -> None:
    require_room([need("a", free=8 * GIB)] * 2)
    said = sentence_of(require_room, [need("a", free=8 * GIB - 1)] * 2)
    assert "needs 8.00 GiB of host memory on a, where 8.00 GiB are free" in said
    assert "3 generations of 2 ranks (2.00 GiB), and 2.00 GiB for copies" in said


def test_what_a_node_keeps_for_another_counts_too() -> None:
    """Node b keeps a's state, which is twice as large."""
    ranks = [need("a", size=2 * GIB, free=100 * GIB), need("b", vendor="nvidia", free=10 * GIB)]
    require_room(ranks)
    ranks[1] = need("b", vendor="nvidia", free=10 * GIB - 1)
    said = sentence_of(require_room, ranks)
    assert "on b" in said
    assert "and of the 1 node whose state it keeps (2.00 GiB)" in said


def test_a_copy_for_the_disk_counts_too() -> None:
    require_room([need("a", free=5 * GIB, copies=2)])
    with pytest.raises(UserError) as error:
        require_room([need("a", free=5 * GIB - 1, copies=2)])
    assert error.value.known_to_all


def test_a_folder_that_a_launcher_keeps_is_needed(tmp_path: Path) -> None:
    assert require_state_folder({"HETERO_STATE_FOLDER": str(tmp_path)}) == tmp_path
    said = sentence_of(require_state_folder, {})
    assert "HETERO_STATE_FOLDER is not set" in said
    said = sentence_of(require_state_folder, {"HETERO_STATE_FOLDER": str(tmp_path / "none")})
    assert "no folder that can be written" in said
