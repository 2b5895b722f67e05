"""The private pieces of megatron-core: one version of it, filled from the plan, then emptied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import indexed_dataset

from hetero.errors import HeteroError
from hetero.groups import Groups, StageOrder, build_groups
from hetero.plan import Mesh, Plan
from megatron.hetero.core_private import (
    clear_groups,
    group_collection,
    register_groups,
    use_whole_reads,
)
from megatron.hetero.cpu_shim import cpu_shim

ALONE = Plan(meshes=(Mesh("cpu", stages=1),), layers=((2,),))
MINUTE = timedelta(seconds=60)


@pytest.fixture
def groups() -> Iterator[Groups]:
    """The groups of a job of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=MINUTE)
    try:
        with cpu_shim():
            yield build_groups(ALONE, 0, vendor_backend="gloo", timeout=MINUTE)
    finally:
        clear_groups()
        dist.destroy_process_group()


def _globals() -> dict[str, Any]:
    return {n: v for n, v in vars(parallel_state).items() if n.startswith("_") and n.isupper()}


def test_registered_groups_are_what_megatron_core_finds_until_they_are_cleared(
    groups: Groups,
) -> None:
    clear_groups()
    before = _globals()
    register_groups(groups, ALONE, 0)
    assert _globals() != before
    for theirs in ("tensor_model", "pipeline_model", "data"):
        found = getattr(parallel_state, f"get_{theirs}_parallel_group")()
        assert found is getattr(groups, theirs.removesuffix("_model")), theirs
    assert parallel_state.get_context_parallel_group() is groups.single
    assert parallel_state.get_model_parallel_group() is groups.model
    assert parallel_state.get_embedding_group() is groups.embedding
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    assert parallel_state.get_pipeline_model_parallel_rank() == 0
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
    assert parallel_state.is_pipeline_first_stage()
    assert parallel_state.is_pipeline_last_stage()
    clear_groups()
    left = {name for name, value in _globals().items() if value is not before[name]}
    assert left == set()


def test_groups_are_built_and_registered_once_more(groups: Groups) -> None:
    """As for a second model in one process."""
    again = build_groups(ALONE, 0, vendor_backend="gloo", timeout=MINUTE)
    for made in (groups, again):
        register_groups(made, ALONE, 0)
        assert parallel_state.get_tensor_model_parallel_group() is made.tensor
    assert again.tensor is not groups.tensor


def test_the_collection_names_every_group_by_megatron_cores_names(groups: Groups) -> None:
    collection = group_collection(groups)
    names = "tp:tensor pp:pipeline mp:model dp:data dp_cp:data cp:single embd:embedding ep:single"
    for pair in names.split():
        theirs, ours = pair.split(":")
        assert getattr(collection, theirs) is getattr(groups, ours), pair
    assert collection.pos_embd is groups.single
    later = replace(groups, pipeline=StageOrder(1, 2))
    assert group_collection(later).pos_embd is None, "only the first stage has positions"
    given = {id(getattr(groups, f.name)) for f in fields(Groups)}
    assert {id(value) for value in vars(collection).values()} <= given


def test_a_token_file_that_is_cut_short_or_gone_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(range(8)))
    with use_whole_reads():
        reader = indexed_dataset._FileBinReader(str(path))
    assert reader.read(numpy.uint16, 2, 4).tobytes() == bytes(range(4, 8))
    with pytest.raises(HeteroError, match=f"{path} was cut short while it is read: 8 bytes, and"):
        reader.read(numpy.uint16, 2, 6)
    reader.num_max_retries = 0
    path.unlink()
    with pytest.raises(HeteroError, match=r"cannot be read any more \(No such file or directory\)"):
        reader.read(numpy.uint16, 2, 4)
