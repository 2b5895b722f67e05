"""The private pieces of megatron-core: filled from the plan, then emptied, on any release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import indexed_dataset
from megatron.core.optimizer import MegatronOptimizer

from hetero.errors import HeteroError
from hetero.pipeline.groups import Groups, StageOrder, build_groups
from hetero.plan import Mesh, Plan
from megatron.hetero import core_private
from megatron.hetero.core_private import (
    clear_groups,
    grads_for_norm,
    group_collection,
    null_tokenizer,
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
    with_sharded_weights = {n for n in _globals() if n.endswith("_WITH_GTP_REMAT")}
    assert {id(_globals()[n]) for n in with_sharded_weights} <= {id(groups.data)}
    clear_groups()
    left = {name for name, value in _globals().items() if value is not before[name]}
    assert left == set()


@pytest.mark.parametrize("with_context_parallel", [False, True])
def test_megatron_cores_default_data_groups_are_the_plans(
    groups: Groups, with_context_parallel: bool
) -> None:
    """From 0.19 on the default groups include ranks that shard weights."""
    register_groups(groups, ALONE, 0)
    for partial in (False, True) if with_context_parallel else (False,):
        found = parallel_state.get_data_parallel_group(
            with_context_parallel=with_context_parallel, partial_data_parallel=partial
        )
        assert found is groups.data
    assert parallel_state.get_expert_data_parallel_group() is groups.data


def test_a_release_without_groups_for_sharded_weights_gets_none(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in core_private._DATA_GROUPS_BESIDE_SHARDED_WEIGHTS:
        monkeypatch.delattr(parallel_state, name, raising=False)
    register_groups(groups, ALONE, 0)
    names = set(core_private._DATA_GROUPS_BESIDE_SHARDED_WEIGHTS)
    assert not names & set(vars(parallel_state))


def test_a_release_with_groups_for_sharded_weights_gets_data_groups(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in core_private._DATA_GROUPS_BESIDE_SHARDED_WEIGHTS:
        monkeypatch.setattr(parallel_state, name, None, raising=False)
    register_groups(groups, ALONE, 0)
    for name in core_private._DATA_GROUPS_BESIDE_SHARDED_WEIGHTS:
        assert getattr(parallel_state, name) is groups.data


@pytest.mark.parametrize("name", ["get_main_grads_for_grad_norm", "get_grads_for_grad_norm"])
def test_gradients_of_the_norm_are_asked_for_by_either_name(name: str) -> None:
    grads = [torch.ones(2)]
    assert grads_for_norm(SimpleNamespace(**{name: lambda: grads})) is grads


def test_the_installed_megatron_core_has_one_of_the_two_names() -> None:
    names = ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm")
    assert sum(hasattr(MegatronOptimizer, name) for name in names) == 1


class SizeWithoutEnd:
    """NullTokenizer up to 0.17."""

    def __init__(self, vocab_size: int) -> None: ...


class SizeWithEnd:
    """NullTokenizer from 0.18 on."""

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = -1) -> None: ...


@pytest.mark.parametrize(
    ("library", "kind", "options"),
    [
        ("null", SizeWithoutEnd, {"vocab_size": 100}),
        ("null-text", SizeWithoutEnd, {"vocab_size": 100}),
        ("null-text", SizeWithEnd, {"vocab_size": 101, "eod_id": 100}),
    ],
    ids=["0.16", "0.17", "0.18"],
)
def test_a_null_tokenizer_is_asked_for_as_the_release_names_it(
    monkeypatch: pytest.MonkeyPatch, library: str, kind: type, options: dict[str, int]
) -> None:
    monkeypatch.setattr(core_private, "TOKENIZER_MAPPING_LIBRARIES", {library: "NullTokenizer"})
    monkeypatch.setattr(core_private, "NullTokenizer", kind)
    assert null_tokenizer(100) == (library, options)


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
