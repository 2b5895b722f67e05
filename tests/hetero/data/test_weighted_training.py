"""Loss, gradients and weights of unequal shares are those of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hetero.data import ShareBatchSampler, Shares, loss_weight
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import THREE_AND_ONE, TWO_AND_TWO, Side, run_ranks

VOCABULARY, WIDTH, LENGTH, SAMPLES, BATCH, STEPS = 17, 8, 12, 60, 20, 4
SHARES = [Shares((9, 2, 3, 6)), Shares((1, 1, 1, 17)), Shares((5, 5, 5, 5)), Shares((3, 8, 7, 2))]
PRECISION = {torch.float64: 1e-12, torch.float32: 2e-5}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.output = nn.Linear(WIDTH, VOCABULARY)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.output(x)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; samples have from none to all of their labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    labels = tokens.roll(1, dims=1).clone()
    for sample, row in enumerate(labels):
        row[: sample % (LENGTH + 1)] = -100
    return tokens, labels


def with_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def with_fsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batches_of(rank: int) -> Iterator[list[int]]:
    sampler = ShareBatchSampler(SAMPLES, SHARES[0], rank=rank, seed=3)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in sampler:
            yield indices
            step += 1
            if step == STEPS:
                return
            sampler.set_shares(SHARES[step], start=sampler.position)


Step = tuple[float, dict[str, numpy.ndarray]]


def train(model: nn.Module, batches: Iterator[list[int]], *, micro_batches: int) -> list[Step]:
    """The loss of the whole batch and the gradients of each step; at the end the weights."""
    tokens, labels = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = []
    for indices in batches:
        weight = loss_weight((labels[indices] != -100).sum())
        whole = torch.zeros((), dtype=torch.float64)
        parts = [part for part in torch.tensor(indices).tensor_split(micro_batches) if len(part)]
        for part in parts:
            logits = model(tokens[part]).flatten(0, 1)
            loss = weight * cross_entropy(logits, labels[part].flatten(), reduction="sum")
            loss.backward()
            whole += loss.detach()
        dist.all_reduce(whole, op=dist.ReduceOp.SUM)
        steps.append((whole.item() / dist.get_world_size(), gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    steps.append((0.0, {name: full(p) for name, p in named(model)}))
    return steps


def gradients_of(model: nn.Module) -> dict[str, numpy.ndarray]:
    return {name: full(p.grad) for name, p in named(model) if p.grad is not None}


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def full(tensor: torch.Tensor) -> numpy.ndarray:
    """An array, since a tensor that goes to another process needs its own process alive."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().numpy().copy()


def train_in_every_way(side: Side) -> dict[str, list[Step]]:
    trained = {}
    for dtype in PRECISION:
        for wrap in (with_ddp, with_fsdp2):
            model = wrap(Model(dtype))
            trained[f"{wrap.__name__} {dtype}"] = train(
                model, batches_of(side.rank), micro_batches=1
            )
    return trained if side.rank == 0 else {}


def train_alone(dtype: torch.dtype) -> list[Step]:
    """One process, the whole batch, a plain mean over its tokens."""
    tokens, labels = data()
    model = Model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ShareBatchSampler(SAMPLES, Shares((BATCH,)), rank=0, seed=3)
    steps: list[Step] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in sampler:
            if len(steps) == STEPS:
                break
            loss = cross_entropy(model(tokens[indices]).flatten(0, 1), labels[indices].flatten())
            loss.backward()
            steps.append((loss.item(), gradients_of(model)))
            optimizer.step()
            optimizer.zero_grad()
    steps.append((0.0, {name: full(p) for name, p in named(model)}))
    return steps


@pytest.mark.parametrize(
    ("vendors", "backend"),
    [(TWO_AND_TWO, "hetero"), (THREE_AND_ONE, "hetero"), (TWO_AND_TWO, "gloo")],
    ids=["2+2", "3+1", "gloo"],
)
def test_every_step_is_that_of_one_process(vendors, backend):
    ranks = values(run_ranks(train_in_every_way, vendors, backend=backend))
    for dtype, precision in PRECISION.items():
        alone = train_alone(dtype)
        for how in ("with_ddp", "with_fsdp2"):
            steps = ranks[0][f"{how} {dtype}"]
            assert len(steps) == len(alone) == STEPS + 1
            for (loss, tensors), (expected, same) in zip(steps, alone, strict=True):
                assert loss == pytest.approx(expected, rel=precision), how
                torch.testing.assert_close(tensors, same, rtol=precision, atol=precision)


def train_in_micro_batches_and_without_labels(side: Side) -> tuple[list[Step], list[Step], list]:
    whole = train(with_ddp(Model(torch.float64)), batches_of(side.rank), micro_batches=1)
    equal = (list(range(rank * 5, rank * 5 + 5)) for rank in [side.rank])
    # FSDP2 gathers in every pass, so all ranks have as many micro-batches.
    parts = train(with_fsdp2(Model(torch.float64)), equal, micro_batches=3)
    model = with_ddp(Model(torch.float64))
    weight = loss_weight(0)
    (weight * model(data()[0][:2]).sum() * 0).backward()
    unweighted = with_ddp(Model(torch.float64))
    tokens, labels = data()
    mine = next(batches_of(side.rank))
    cross_entropy(unweighted(tokens[mine]).flatten(0, 1), labels[mine].flatten()).backward()
    others = [weight.item(), gradients_of(model), gradients_of(unweighted)]
    return (whole, parts, others) if side.rank == 0 else ([], [], [])


def test_micro_batches_add_up_and_no_labels_are_no_gradient():
    whole, parts, (weight, nothing, unweighted) = values(
        run_ranks(train_in_micro_batches_and_without_labels, TWO_AND_TWO)
    )[0]
    tokens, labels = data()
    model = Model(torch.float64)
    cross_entropy(model(tokens[:BATCH]).flatten(0, 1), labels[:BATCH].flatten()).backward()
    torch.testing.assert_close(parts[0][1], gradients_of(model), rtol=1e-12, atol=1e-12)
    assert weight == 4
    assert all((gradient == 0).all() for gradient in nothing.values())
    # What the weight is for: a mean of the ranks' means is another gradient.
    exact = whole[0][1]["output.weight"]
    assert numpy.linalg.norm(unweighted["output.weight"] - exact) > 0.05 * numpy.linalg.norm(exact)


@pytest.mark.parametrize("count", [3, torch.tensor(3)])
def test_without_a_group_pytorch_says_what_is_missing(count):
    with pytest.raises(ValueError, match="call init_process_group"):
        loss_weight(count)
