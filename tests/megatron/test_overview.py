"""The table of stages that a run begins with."""

from __future__ import annotations

from typing import Any

from megatron.hetero.overview import stage_table

ROW: dict[str, Any] = {
    "stage": 0,
    "vendor": "nvidia",
    "simulated": False,
    "ranks": [0, 1, 2, 3],
    "layers": [2, 2],
    "tensor_parallel": 1,
    "context_parallel": 1,
    "data_parallel": 4,
    "expert_parallel": 1,
    "parameters": 1000,
    "state_bytes_per_rank": 2**20,
    "next_stage": 1,
    "next_transport": "shm",
    "next_is_boundary": True,
}


def test_ranks_that_share_sequences_or_experts_are_shown_where_a_mesh_has_them() -> None:
    heads, row = stage_table([ROW])
    assert heads[3:6] == ["TP", "DP", "layers"]
    assert row == ["0", "nvidia", "0-3", "1", "4", "2+2", "1,000", "1.0 MiB", "1: shm (boundary)"]
    other = {**ROW, "context_parallel": 2, "data_parallel": 2, "expert_parallel": 4}
    heads, first, second = stage_table([ROW, other])
    assert heads[3:7] == ["TP", "CP", "DP", "EP"]
    assert (first[3:7], second[3:7]) == (["1", "1", "4", "1"], ["1", "2", "2", "4"])
