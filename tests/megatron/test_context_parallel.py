"""Attention of ranks that share sequences, against one rank that has all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetero.plan.plan import context_chunks
from megatron.hetero import context_parallel
from megatron.hetero.context_parallel import COMM_TYPES, attend, block_kernel, slice_batch
from tests.forked_ranks import run_forked, values

BATCH, WIDTH, GROUPS = 2, 16, 4
ROWS_A_RANK = 16
PATIENCE = 120.0
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WHOLE, CHOSEN = "whole", "chosen"


def chunks_of(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    chunks = context_chunks(size, rank, whole.shape[2])
    return torch.cat([whole[:, :, rows.start : rows.stop] for rows in chunks], 2)


def rows_of(whole: torch.Tensor) -> torch.Tensor:
    return chunks_of(whole, dist.get_rank(), dist.get_world_size())


def compute(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, is_causal=allowed is None, enable_gqa=True
    )


def documents(sequence: int, device: str) -> torch.Tensor:
    """A causal mask of three documents of different lengths."""
    ends = torch.tensor([sequence // 5, sequence // 2, sequence], device=device)
    of = torch.bucketize(torch.arange(sequence, device=device), ends, right=True)
    return ((of[:, None] == of[None]) & torch.ones_like(of[:, None] == of[None]).tril())[None, None]


def differences(
    kind: str, heads: int, dtype: torch.dtype, *, masked: bool, blocks: str, device: str
) -> list[float]:
    """Of the output and of the gradients of query, key and value: norm of it over the norm.

    `blocks`: the kernel that computes them, or CHOSEN for torch's choice, or WHOLE for none. One
    that does not fit has no differences.
    """
    torch.manual_seed(1)
    sequence = ROWS_A_RANK * dist.get_world_size()
    query, key, value, grad = (
        torch.randn(BATCH, count, sequence, WIDTH, device=device).to(dtype)
        for count in (heads, GROUPS, GROUPS, heads)
    )
    allowed = documents(sequence, device) if masked else None
    whole = [each.clone().requires_grad_() for each in (query, key, value)]
    output = compute(*whole, allowed)
    output.backward(grad)
    own = [rows_of(each).clone().requires_grad_() for each in (query, key, value)]
    kernel = None
    if blocks != WHOLE:
        with sdpa_kernel(BACKENDS[blocks]) if blocks in BACKENDS else nullcontext():
            kernel = block_kernel(*own, scale=None)
        if kernel is None:
            return [0.0]
    mine = attend(
        *own,
        allowed,
        compute=compute,
        comm_type=kind,
        group=dist.group.WORLD,
        kernel=kernel,
    )
    mine.backward(rows_of(grad))
    found = [mine, *(each.grad for each in own)]
    expected = [output, *(each.grad for each in whole)]
    return [
        float((one.float() - rows_of(other).float()).norm() / rows_of(other).float().norm())
        for one, other in zip(found, expected, strict=True)
    ]


Differences = dict[tuple[Any, ...], list[float]]


def differences_of_sizes(
    rank: int, sizes: Sequence[int], folder: str, device: str, end: Connection
) -> None:
    """Sends the differences of a rank in each group of the first `size` ranks that it is in."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    end.send(([all_differences(rank, size, folder, device) for size in sizes if rank < size], None))


def all_differences(rank: int, size: int, folder: str, device: str) -> Differences:
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store of {size}", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    of = partial(differences, device=device)
    found: Differences = {}
    for kind in COMM_TYPES:
        for heads in (GROUPS, 2 * GROUPS):
            for dtype in (torch.float32, torch.bfloat16):
                # Only rounding differs in bfloat16: not what is sent for which heads and masks.
                for masked in (True,) if dtype is torch.bfloat16 else (False, True):
                    for blocks in (WHOLE, CHOSEN, *(BACKENDS if device == "cuda" else ())):
                        key = (kind, heads, dtype, masked, blocks)
                        found[key] = of(kind, heads, dtype, masked=masked, blocks=blocks)
    dist.destroy_process_group()
    return found


def run_ranks(sizes: Sequence[int], folder: Path, device: str) -> dict[int, list[Differences]]:
    """Of every rank, by the size of the group. The largest comes last."""
    arguments = [(rank, sizes, str(folder), device) for rank in range(sizes[-1])]
    ranks = values(run_forked(differences_of_sizes, arguments, patience=PATIENCE))
    return {size: [own.pop(0) for own in ranks[:size]] for size in sizes}


def judge(found: list[Differences], *, rounding: float = 1e-6) -> None:
    for rank in found:
        assert len(rank) >= 3 * 2 * (2 + 1) * 2
        for key, measured in rank.items():
            limit = rounding if torch.float32 in key else 1e-2
            assert max(measured) < limit, key


@pytest.fixture(scope="module")
def of_cpus(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Differences]]:
    return run_ranks([2, 4], tmp_path_factory.mktemp("ranks"), "cpu")


@pytest.mark.parametrize("size", [2, 4])
def test_every_type_computes_what_one_rank_does(
    size: int, of_cpus: dict[int, list[Differences]]
) -> None:
    found = of_cpus[size]
    judge(found)
    for rank in found:
        assert all(len(measured) == 4 for measured in rank.values())
        for (kind, *_), measured in rank.items():
            if kind == "a2a":
                assert measured == [0.0] * 4, "whole sequences of some heads have the same bits"


@pytest.mark.gpu
def test_every_type_computes_what_one_gpu_does_with_every_kernel(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    judge(run_ranks([2], tmp_path, "cuda")[2], rounding=1e-5)


def test_a_rank_takes_its_chunks_of_a_batch_and_counts_the_tokens_of_all() -> None:
    tokens = torch.arange(16).view(2, 8)
    mask = torch.ones(2, 8)
    mask[0, :4] = 0
    batch = {
        "tokens": tokens,
        "loss_mask": mask,
        "attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool),
    }
    sliced = slice_batch(batch, size=2, rank=0)
    assert sliced["tokens"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert sliced["loss_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert sliced["attention_mask"].shape == (2, 1, 8, 8)
    assert sliced["whole_tokens"] == 12
    other = slice_batch(batch, size=2, rank=1)
    assert other["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert slice_batch(batch, size=1, rank=0) == batch


@dataclass(frozen=True)
class Place:
    """Stands in for a group of one of its ranks."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


def ring_differences(backend: str, dtype: torch.dtype, *, size: int, device: str) -> list[float]:
    """As `differences`, of all ranks of a ring, whose blocks one process computes."""
    torch.manual_seed(2)
    sequence, groups = 64 * size, 8 if backend == "efficient" else 4
    query, key, value, grad = (
        torch.randn(BATCH, heads, sequence, 64, device=device).to(dtype)
        for heads in (8, groups, groups, 8)
    )
    whole = [each.clone().requires_grad_() for each in (query, key, value)]
    expected = compute(*whole, None)
    expected.backward(grad)
    held = [torch.stack([chunks_of(t, r, size) for t in (key, value)]) for r in range(size)]
    dheld = [torch.zeros_like(each, dtype=torch.float32) for each in held]
    worst = [0.0] * 4
    for rank in range(size):
        own, own_grad = (chunks_of(each, rank, size) for each in (query, grad))
        with sdpa_kernel(BACKENDS[backend]) if backend in BACKENDS else nullcontext():
            kernel = block_kernel(own, *held[rank], scale=None)
        if kernel is None:
            return []
        group: Any = Place(rank, size)
        sums = context_parallel._OnlineSoftmax(own)
        blocks = [context_parallel._ring_block(s, own.shape[2], group) for s in range(size)]
        sources = [(rank - step) % size for step in range(size)]
        for block, source in zip(blocks, sources, strict=True):
            sums.add(kernel.forward(own, *held[source], block), block.queries)
        output, dquery = sums.output.to(dtype), torch.zeros_like(own, dtype=torch.float32)
        for block, source in zip(blocks, sources, strict=True):
            parts = kernel.backward(own_grad, own, *held[source], output, sums.lse, block)
            context_parallel._add_gradients(parts, block, dquery, dheld[source])
        for place, (mine, theirs) in enumerate(((output, expected), (dquery, whole[0].grad))):
            theirs = chunks_of(theirs, rank, size)
            worst[place] = max(worst[place], distance(mine, theirs))
    for rank in range(size):
        for place, mine, theirs in zip((2, 3), dheld[rank], whole[1:], strict=True):
            worst[place] = max(worst[place], distance(mine, chunks_of(theirs.grad, rank, size)))
    return worst


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_blocks_of_a_ring_add_up_to_the_whole(size: int) -> None:
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        measured = ring_differences(CHOSEN, dtype, size=size, device="cpu")
        assert len(measured) == 4
        assert max(measured) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [CHOSEN, *BACKENDS])
def test_the_blocks_of_a_ring_add_up_with_every_kernel(backend: str, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    measured = ring_differences(backend, dtype, size=3, device="cuda")
    if not measured:
        pytest.skip(f"{backend} kernels of this GPU do not take {dtype}")
    assert max(measured) < (1e-5 if dtype == torch.float32 else 1e-2)
