"""What PyTorch builds upon groups, over two vendors: each gives what it gives over gloo alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed import pipelining as pp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from tests.forked_ranks import values
from tests.gpus import NEEDS_A_GPU, gpu_of
from tests.hetero.collectives.ranks import THREE_AND_ONE, TWO_AND_TWO, Side, run_ranks

WIDTH, WIDE, STEPS = 8, 512, 4

Feature = Callable[[Side], Any]


def device_of(side: Side) -> torch.device:
    return gpu_of(side.rank) if side.options.get("on_gpus") else torch.device("cpu")


def all_ranks(side: Side) -> DeviceMesh:
    return init_device_mesh(device_of(side).type, (side.size,))


def new_model(side: Side, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    return model.to(device_of(side))


def trained(
    side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> list[float]:
    """The losses of this rank's samples, and the weights' sum at the end."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + side.rank)
        samples = torch.randn(6, WIDTH, generator=generator).to(device_of(side))
        optimizer.zero_grad()
        loss = mse_loss(model(samples), samples)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(float(p.detach().double().abs().sum()) for p in model.parameters())]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pipelines(side: Side) -> list[Any]:
    """One chunk or two a rank; losses on the last rank, gradients on all."""
    device = device_of(side)
    generator = torch.Generator().manual_seed(3)
    samples, targets = torch.randn(2, 16, WIDTH, generator=generator).to(device)
    found: list[Any] = []
    for schedule, chunks in (
        (pp.ScheduleGPipe, 1),
        (pp.Schedule1F1B, 1),
        (pp.ScheduleInterleaved1F1B, 2),
        (pp.ScheduleInterleavedZeroBubble, 2),
    ):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH).to(device) for _ in range(chunks * side.size)]
        places = range(side.rank, len(layers), side.size)
        stages: list[Any] = [
            pp.PipelineStage(layers[place], place, len(layers), device) for place in places
        ]
        running = schedule(
            stages if chunks > 1 else stages[0], n_microbatches=2 * side.size, loss_fn=mse_loss
        )
        losses: list[torch.Tensor] = []
        given = [samples] if side.rank == 0 else []
        if side.rank == side.size - 1:
            running.step(*given, target=targets, losses=losses)
        else:
            running.step(*given)
        found += [loss.item() for loss in losses]
        found += [float(layers[place].weight.grad.double().abs().sum()) for place in places]
    return found


def communication_hooks(side: Side) -> list[Any]:
    found: list[Any] = []
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    for own, hook in (
        (None, default_hooks.allreduce_hook),
        (state, powerSGD_hook.powerSGD_hook),
    ):
        model = DistributedDataParallel(new_model(side))
        model.register_comm_hook(own, hook)
        # PowerSGD's waits for a GPU where there is one, also on behalf of CPU tensors.
        on_gpu = device_of(side).type == "cuda"
        with mock.patch.object(torch.cuda, "is_available", return_value=on_gpu):
            found.append(trained(side, model, sgd(model)))
    return found


def averaging_now_and_then(side: Side) -> list[float]:
    pair = dist.new_subgroups(2)[0]
    model = DistributedDataParallel(new_model(side))
    own = local_sgd.PostLocalSGDState(process_group=None, subgroup=pair, start_localSGD_iter=2)
    model.register_comm_hook(own, local_sgd.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    return trained(side, model, PostLocalSGDOptimizer(sgd(model), averager), steps=8)


def ranks_with_fewer_batches(side: Side) -> list[float]:
    model = DistributedDataParallel(new_model(side))
    with Join([model]):
        return trained(side, model, sgd(model), steps=2 + side.rank)


def a_sharded_optimizer(side: Side) -> list[float]:
    model = DistributedDataParallel(new_model(side), static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=True
    )
    return trained(side, model, optimizer)


def tensor_parallel_with_its_loss(side: Side) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(32, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 32),
        nn.Linear(32, 16),
        nn.Linear(16, 32),
    ).to(device_of(side))
    parallelize_module(
        model,
        all_ranks(side),
        {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "1": SequenceParallel(),
            "2": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1)),
            "4": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    optimizer, losses = sgd(model), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens, labels = torch.randint(0, 32, (2, 2, 8), generator=generator).to(device_of(side))
        with loss_parallel():
            loss: Any = cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().item())
    return losses


def every_redistribution(side: Side) -> list[bool]:
    mesh = init_device_mesh(device_of(side).type, (2, side.size // 2))
    whole = torch.arange(5 * 7 * 3.0, device=device_of(side)).reshape(5, 7, 3)
    layouts = [Replicate(), Shard(0), Shard(1), Shard(2)]
    return [
        torch.equal(
            distribute_tensor(whole, mesh, [one, other])
            .redistribute(placements=[then, Replicate()])
            .full_tensor(),
            whole,
        )
        for one in layouts
        for other in layouts
        for then in layouts
    ]


def sharded_layers_gathered_ahead(side: Side) -> list[float]:
    """Each layer's weights come while the one before computes; every second step adds gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE) for _ in range(6)]
    model = nn.Sequential(*layers).to(device_of(side))
    for part in (*layers, model):
        fully_shard(part, mesh=all_ranks(side))
    whole: Any = model
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(2 * STEPS):
        is_last = step % 2 == 1
        whole.set_requires_gradient_sync(is_last)
        generator = torch.Generator().manual_seed(100 * step + side.rank)
        samples = torch.randn(8, WIDE, generator=generator).to(device_of(side))
        loss = mse_loss(model(samples), samples)
        loss.backward()
        found.append(loss.item())
        if is_last:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found.append(norm.full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
    return found


def a_checkpoint_saved_beside_training(side: Side) -> list[float]:
    """By FSDP2's shards; loaded into another model's."""
    folder: Path = side.options["folder"]
    models = [new_model(side, seed) for seed in (0, 5)]
    for model in models:
        fully_shard(model, mesh=all_ranks(side))
    losses = trained(side, models[0], torch.optim.AdamW(models[0].parameters()))[:STEPS]
    saved = {"model": get_model_state_dict(models[0])}
    checkpoint.async_save(saved, checkpoint_id=folder).result()
    dist.barrier()
    loaded = {"model": get_model_state_dict(models[1])}
    checkpoint.load(loaded, checkpoint_id=folder)
    set_model_state_dict(models[1], loaded["model"])
    ours, theirs = ([p.full_tensor() for p in model.parameters()] for model in models)
    assert all(map(torch.equal, ours, theirs))
    return losses


FEATURES: tuple[Feature, ...] = (
    pipelines,
    communication_hooks,
    averaging_now_and_then,
    ranks_with_fewer_batches,
    a_sharded_optimizer,
    tensor_parallel_with_its_loss,
    every_redistribution,
    sharded_layers_gathered_ahead,
    a_checkpoint_saved_beside_training,
)


def all_features(side: Side) -> dict[str, Any]:
    return {feature.__name__: feature(side) for feature in FEATURES}


def flat(found: Any) -> Iterable[float]:
    if isinstance(found, list):
        for part in found:
            yield from flat(part)
    else:
        yield float(found)


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What so many ranks find over gloo, which knows no vendor."""

    @cache
    def run(size: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("gloo")
        return values(run_ranks(all_features, ("nvidia",) * size, backend="gloo", folder=folder))

    return run


@pytest.mark.parametrize(
    "vendors",
    [
        pytest.param(TWO_AND_TWO, id="2+2", marks=pytest.mark.slow),
        pytest.param(THREE_AND_ONE, id="3+1"),
    ],
)
def test_features_of_torch_give_what_they_give_over_gloo(vendors, over_gloo, tmp_path):
    ours = values(run_ranks(all_features, vendors, folder=tmp_path))
    compare_features(ours, over_gloo(len(vendors)))


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("vendors", [("nvidia", "amd"), TWO_AND_TWO], ids=["1+1", "2+2"])
def test_the_same_between_gpus(vendors, over_gloo, tmp_path):
    """Beside gloo's on CPUs."""
    ours = values(run_ranks(all_features, vendors, folder=tmp_path, on_gpus=True))
    compare_features(ours, over_gloo(len(vendors)))


def compare_features(ours: Sequence[dict[str, Any]], gloos: Sequence[dict[str, Any]]) -> None:
    for rank, (found, expected) in enumerate(zip(ours, gloos, strict=True)):
        assert found.keys() == expected.keys() == {feature.__name__ for feature in FEATURES}
        for name, figures in expected.items():
            wanted = list(flat(figures))
            assert wanted, name
            assert all(map(math.isfinite, wanted)), name
            assert list(flat(found[name])) == pytest.approx(wanted, rel=2e-5), (rank, name)
    assert all(all(one["every_redistribution"]) for one in ours)


def test_the_profiler_shows_each_call_in_the_thread_that_makes_it():
    for names in values(run_ranks(call_while_profiled, ("nvidia", "amd"))):
        assert names == [
            "hetero:all_reduce",
            "hetero:broadcast",
            "hetero:recv",
            "hetero:send",
            "hetero:barrier",
        ]


def call_while_profiled(side: Side) -> list[str]:
    tensor, peer = torch.ones(4), 1 - side.rank
    dist.all_reduce(tensor)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0, async_op=True).wait()  # type: ignore[union-attr]
        works = [dist.irecv(torch.empty(4), peer), dist.isend(tensor, peer)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        dist.barrier()
    dist.all_reduce(tensor)
    return [event.name for event in watched.events() if event.name.startswith("hetero:")]
