"""The optimizer's state as `dp_reshardable`: parameters found in buckets of any layout."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.tensor_names import ADAM_MOMENTS, MAIN_COPY
from megatron.hetero.megatron_lm import torch_dist_writer
from megatron.hetero.megatron_lm.optimizer_states import find_optimizer
from megatron.hetero.megatron_lm.tensors import ModelTensor, buffer_order, model_tensors
from megatron.hetero.megatron_lm.torch_dist_reader import TorchDistReader
from megatron.hetero.megatron_lm.torch_dist_writer import TensorChunk
from tests.megatron.megatron_lm.tiny_megatron import GPT2, LLAMA, QWEN, weights

ROWS = 32
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def _aligned(position: int, to: int = 64) -> int:
    return -(-position // to) * to


def _buckets(
    tensors: Sequence[ModelTensor], *, rank: int, ranks: int, bucket_size: int, shared: bool
) -> Iterator[tuple[list[tuple[ModelTensor, int, int]], int]]:
    """megatron-core's gradient buffer: each bucket's tensors with begin and end, and its size."""
    bucket: list[tuple[ModelTensor, int, int]] = []
    position = 0
    for tensor in tensors:
        position = _aligned(position)
        alone = shared and tensor.name in (EMBEDDING, OUTPUT)
        if alone and bucket:
            # It ends where the next parameter would begin.
            yield bucket, position
            bucket, position = [], 0
        end = position + tensor.shard(rank, ranks).size
        bucket.append((tensor, position, end))
        position = end
        if alone or end >= bucket_size:
            yield bucket, end
            bucket, position = [], 0
    if bucket:
        yield bucket, position


def _pieces(size: int, edges: set[int], replicas: int) -> Iterator[tuple[int, int]]:
    """A bucket is cut where parameters begin and end, and evenly over data-parallel ranks."""
    share = _aligned(size, 128 * replicas) // replicas
    cuts = sorted(edges | {0, size} | set(range(0, size, share)))
    return itertools.pairwise(cuts)


def _write(
    folder: Path,
    args: Mapping[str, Any],
    states: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    ranks: int,
    chunks: Sequence[Sequence[int]],
    replicas: int,
    bucket_size: int,
) -> None:
    """A checkpoint with nothing but the state. `chunks[v][p]` is the number of layers there."""
    tensors = model_tensors(args, rows=ROWS)
    tied = not args["untie_embeddings_and_output_weights"]
    stages, layer, parts = len(chunks[0]), 0, []
    fused = args["transformer_impl"] != "local"
    several = stages * len(chunks) > 1
    for virtual, counts in enumerate(chunks):
        for stage, count in enumerate(counts):
            first = virtual == 0 and stage == 0
            last = virtual == len(chunks) - 1 and stage == stages - 1
            held = [
                t
                for t in tensors
                if (t.layer is not None and layer <= t.layer < layer + count)
                or (first and t.name.startswith("embedding."))
                or (last and t.layer is None and not t.name.startswith("embedding."))
            ]
            if last and tied and several:
                held.append(ModelTensor(OUTPUT, tensors[0].shape, partition_dim=0))
            layer += count
            for rank in range(ranks):
                buckets = _buckets(
                    buffer_order(held, fused_norms=fused),
                    rank=rank,
                    ranks=ranks,
                    bucket_size=bucket_size,
                    shared=tied and several,
                )
                for number, (bucket, size) in enumerate(buckets):
                    key = (
                        f"optimizer.distributed.dp_group_idx_{stage * ranks + rank}."
                        f"gbuf_idx_{virtual}.dtype_(torch.bfloat16, torch.float32)."
                        f"bucket_idx_{number}."
                    )
                    for state, values in states.items():
                        parts += _bucket_parts(
                            key + state, bucket, size, values, rank, ranks, replicas
                        )
    common = {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    folder.mkdir(exist_ok=True)
    torch_dist_writer.write_torch_dist(
        folder,
        parts,
        empty_objects=["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"],
        common=common,
    )


def _bucket_parts(
    key: str,
    bucket: Sequence[tuple[ModelTensor, int, int]],
    size: int,
    values: Mapping[str, torch.Tensor],
    rank: int,
    ranks: int,
    replicas: int,
) -> Iterator[TensorChunk]:
    flat = torch.full((size,), float("nan"))
    for tensor, begin, end in bucket:
        whole = values[EMBEDDING if tensor.name not in values else tensor.name]
        regions = tensor.shard(rank, ranks).regions()
        slices = [
            whole[tuple(slice(s, s + n) for s, n in zip(b.start, b.shape, strict=True))]
            for b in regions
        ]
        flat[begin:end] = torch.cat([part.reshape(-1) for part in slices])
    edges = {edge for _, begin, end in bucket for edge in (begin, end)}
    for begin, end in _pieces(size, edges, replicas):
        values_here = flat[begin:end].clone()
        yield TensorChunk(
            key, (size,), torch.float32, Region((begin,), (end - begin,)), values_here.clone
        )


@pytest.fixture(autouse=True)
def _a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank stores beside the buckets: groups of parameters with their count of updates."""

    def resolve(self: Any, item: Any) -> Any:
        if item.type != torch_dist_writer.WriteItemType.BYTE_IO:
            return original(self, item)
        stream = io.BytesIO()
        torch.save([{"param_groups": [{"step": 3}, {"step": 3}]}], stream)
        return stream

    original = torch_dist_writer._Planner.resolve_data
    monkeypatch.setattr(torch_dist_writer._Planner, "resolve_data", resolve)


LOCAL, FUSED = "local", "transformer_engine"
CASES = [
    (LLAMA, LOCAL, 1, [[4]], 1, 10_000),
    (LLAMA, FUSED, 2, [[2, 2]], 1, 700),
    (LLAMA, LOCAL, 2, [[1, 3]], 3, 700),
    (LLAMA, FUSED, 1, [[1, 1], [1, 1]], 2, 300),
    (QWEN, LOCAL, 2, [[3, 1]], 2, 500),
    (QWEN, FUSED, 1, [[1, 0, 2, 1]], 2, 500),
    (GPT2, LOCAL, 4, [[2, 2]], 2, 300),
    (GPT2, FUSED, 2, [[4]], 4, 400),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[1]}-tp{case[2]}-{case[3]}-dp{case[4]}"
)
def test_every_tensor_is_found_in_buckets_of_any_layout(
    case: tuple[Any, ...], tmp_path: Path
) -> None:
    model, impl, ranks, chunks, replicas, bucket_size = case
    args = {**model, "transformer_impl": impl, "tensor_model_parallel_size": ranks}
    states = {name: weights(args) for name in ("param", *ADAM_MOMENTS)}
    for number, name in enumerate(ADAM_MOMENTS):
        states[name] = {n: t + 1 + number for n, t in states[name].items()}
    layout = {"ranks": ranks, "chunks": chunks, "replicas": replicas}
    _write(tmp_path, args, states, **layout, bucket_size=bucket_size)
    tensors = model_tensors(args, rows=ROWS)
    found = find_optimizer(TorchDistReader(tmp_path), tensors, args)
    assert found.step == 3
    for ours, theirs in ((MAIN_COPY, "param"), *((moment, moment) for moment in ADAM_MOMENTS)):
        for tensor in tensors:
            assert torch.equal(found.states.read(ours, tensor), states[theirs][tensor.name])


def test_another_order_is_refused(tmp_path: Path) -> None:
    args = {**LLAMA, "transformer_impl": "local", "tensor_model_parallel_size": 1}
    states = {name: weights(args) for name in ("param", *ADAM_MOMENTS)}
    layout = {"ranks": 1, "chunks": [[4]], "replicas": 1, "bucket_size": 10_000}
    _write(tmp_path, args, states, **layout)
    reader = TorchDistReader(tmp_path)
    tensors = model_tensors({**args, "ffn_hidden_size": 32}, rows=ROWS)
    with pytest.raises(UserError, match="order of parameters that is not known"):
        find_optimizer(reader, tensors, args)


def _without_tensors(folder: Path, *objects: str, **common: Any) -> TorchDistReader:
    folder.mkdir()
    torch_dist_writer.write_torch_dist(folder, [], empty_objects=objects, common=common)
    return TorchDistReader(folder)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    kind = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
    tensors = model_tensors(LLAMA, rows=ROWS)
    with pytest.raises(UserError, match="dp_zero_gather_scatter"):
        find_optimizer(_without_tensors(tmp_path / "zero", content_metadata=kind), tensors, LLAMA)
    key = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    with pytest.raises(UserError, match="as unknown"):
        find_optimizer(_without_tensors(tmp_path / "unknown", key), tensors, LLAMA)
    assert find_optimizer(_without_tensors(tmp_path / "none"), tensors, LLAMA) is None
