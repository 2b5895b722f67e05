"""What is measured of each rank, what follows from it, and vendors that are slowed down."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hetero.data import Balance, ShareBatchSampler, Shares, slow_down, vendor_of_each_rank
from hetero.data.layer_times import HostClock, layers_of
from hetero.data.slowdown import slowdown_factors
from hetero.errors import UserError
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, run_ranks

WIDTH = 4


class MadeUpClock(HostClock):
    """Time that passes only where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def burn(self, seconds: float) -> None:
        self.now += seconds


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds * len(x)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.clock.now += 2 * ctx.seconds * len(gradient)
        return gradient * weight, (gradient * x).sum(0), None, None


class Layer(nn.Module):
    """Takes `seconds` a sample forward and twice that backward."""

    def __init__(self, clock: MadeUpClock, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self._clock, self._seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x, self.weight, self._clock, self._seconds)


class Model(nn.Module):
    """Three layers, and a wait of 100 s before each pass of each, as for another rank."""

    def __init__(self, clock: MadeUpClock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(clock, seconds) for seconds in (0.25, 1.0, 0.75))
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: clock.burn(100), prepend=True)
            layer.register_forward_hook(self.wait_in_backward)
        self._clock = clock

    def wait_in_backward(self, _: nn.Module, __: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._clock.burn(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


SECONDS = 3 * (0.25 + 1.0 + 0.75)
"""Of one sample, forward and backward."""


def environ(slowdown: str) -> dict[str, str]:
    return {"HETERO_VENDOR": os.environ.get("HETERO_VENDOR", "amd"), "HETERO_SLOWDOWN": slowdown}


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
def test_a_layer_takes_as_many_times_as_long(factor):
    clock = MadeUpClock()
    model = Model(clock)
    assert slow_down(model, environ=environ(f"amd={factor}"), clock=clock) == factor
    model(torch.ones(2, WIDTH, requires_grad=True)).backward()
    assert clock.now == 6 * 100 + 2 * SECONDS * factor


def test_a_first_layer_whose_input_has_no_gradient_is_slowed_too():
    clock = MadeUpClock()
    model = Model(clock)
    slow_down(model, environ=environ("amd=2"), clock=clock)
    for step in (1, 2):
        model(torch.ones(2, WIDTH)).backward()
        assert clock.now == step * (6 * 100 + 2 * SECONDS * 2)


def test_what_checkpointing_computes_again_is_slowed_once():
    clock = MadeUpClock()
    layer = Layer(clock, 1.0)
    slow_down(layer, environ=environ("amd=2"), clock=clock)
    x = torch.ones(1, WIDTH, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert clock.now == 2 * (1 + 1 + 2)


class WritesToItsInputs(Layer):
    def forward(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        x += added
        return super().forward(x)


def test_a_slowed_layer_may_write_to_its_inputs():
    clock = MadeUpClock()
    layer = WritesToItsInputs(clock, 1.0)
    slow_down(layer, environ=environ("amd=2"), clock=clock)
    x = torch.ones(2, WIDTH, requires_grad=True)
    doubled = 2 * x
    (layer(doubled, x) + doubled).sum().backward()
    assert (doubled == 3).all()
    assert (x.grad == 3 * 2).all(), "of the layer, and of what it has written to its input"


def test_a_copy_of_a_slowed_model_has_its_own_weights():
    clock = MadeUpClock()
    model = Model(clock)
    slow_down(model, environ=environ("amd=2"), clock=clock)
    averaged = copy.deepcopy(model)
    with torch.no_grad():
        averaged.layers[0].weight.zero_()
    assert averaged(torch.ones(1, WIDTH)) == 0
    assert model(torch.ones(1, WIDTH)) == WIDTH


def test_no_other_vendor_is_slowed():
    assert slow_down(nn.Linear(2, 2), environ=environ("nvidia=2")) == 1.0
    assert slow_down(nn.Linear(2, 2), environ={}) == 1.0


def test_all_that_is_wrong_with_the_variable_is_said_at_once():
    assert slowdown_factors("amd=1.5, NVIDIA=2") == {"amd": 1.5, "nvidia": 2.0}
    with pytest.raises(UserError) as error:
        slowdown_factors("intel=2,amd=0.5,nvidia,amd=inf")
    for words in ("'intel=2' names no vendor", "'amd=0.5' has no", "'nvidia' has no", "amd is nam"):
        assert words in str(error.value)


def test_layers_are_the_parts_that_hold_all_parameters():
    block = nn.TransformerEncoderLayer(8, 2)
    inner = nn.Module()
    inner.embedding, inner.blocks = nn.Embedding(3, 8), nn.ModuleList([block])
    model = nn.Module()
    model.inner, model.act, model.head = inner, nn.ReLU(), nn.Sequential(nn.Linear(8, 3), nn.ReLU())
    loss = nn.CrossEntropyLoss()
    assert layers_of(model, loss) == [inner.embedding, block, model.head[0], loss]


def test_what_is_compiled_is_one_layer():
    compiled = [torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) for _ in range(2)]
    assert layers_of(nn.Sequential(nn.Linear(2, 2), compiled[0]), compiled[1])[1:] == compiled


def train(side: Side, wrap, *, slow_first: bool, every: int | None) -> list:
    clock = MadeUpClock()
    model = Model(clock)
    told = environ("amd=2")
    if slow_first:
        slow_down(model, environ=told, clock=clock)
    wrapped = wrap(model)
    sampler = ShareBatchSampler(400, Shares.equal(20, side.size), rank=side.rank)
    balance = Balance(sampler, wrapped, every=every, warm_up=1, steps=2, clock=clock)
    if not slow_first:
        slow_down(model, environ=told, clock=clock)
    changes = []
    for step, indices in enumerate(sampler):
        wrapped(torch.ones(len(indices), WIDTH)).backward()
        with torch.no_grad():  # an evaluation between two steps is none of them
            wrapped(torch.ones(30, WIDTH))
        if shares := balance.step(len(indices)):
            changes.append((step, shares.counts, balance.seconds_per_sample))
        if step == 9 and not slow_first:
            # From here on the first rank is as slow as the last.
            slow_down(model, environ=environ("nvidia=2" if side.rank == 0 else ""), clock=clock)
    return changes


def with_fsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_in_every_way(side: Side) -> dict[str, list]:
    return {
        f"{wrap.__name__} {slow_first}": train(
            side, wrap, slow_first=slow_first, every=None if slow_first else 3
        )
        for wrap in (DistributedDataParallel, with_fsdp2)
        for slow_first in (True, False)
    } | {"vendors": vendor_of_each_rank()}


def vendors_of_spawned_ranks(side: Side) -> tuple[list[str], float]:
    """As `torch.multiprocessing.spawn` starts them: no launcher has said a LOCAL_RANK."""
    os.environ.pop("LOCAL_RANK", None)
    os.environ |= {"HETERO_VENDOR": "nvidia*2,amd", "HETERO_SLOWDOWN": "amd=1.5"}
    return vendor_of_each_rank(), slow_down(torch.nn.Linear(1, 1))


def test_ranks_that_no_launcher_numbered_play_the_vendors_of_a_list():
    vendors = ["nvidia", "nvidia", "amd"]
    ranks = values(run_ranks(vendors_of_spawned_ranks, vendors, backend="gloo"))
    assert ranks == [(vendors, 1.0), (vendors, 1.0), (vendors, 1.5)]


def test_shares_follow_what_was_measured_on_all_ranks_with_the_same_step():
    ranks = values(run_ranks(train_in_every_way, ("nvidia", "nvidia", "amd")))
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0]["vendors"] == ["nvidia", "nvidia", "amd"]
    costs = (SECONDS, SECONDS, 2 * SECONDS)
    for wrap in ("DistributedDataParallel", "with_fsdp2"):
        # At the start alone, and nothing changes when it is measured again.
        assert ranks[0][f"{wrap} True"] == [(2, (8, 8, 4), costs)]
        # And every third step: once for the start, once for what changed.
        first, second = ranks[0][f"{wrap} False"]
        assert first == (2, (8, 8, 4), costs)
        assert second == (11, (5, 10, 5), (2 * SECONDS, SECONDS, 2 * SECONDS))


def train_faster_while_waiting(side: Side) -> tuple[list, bool]:
    """The first rank takes 1 s a sample, and half as much again once it need not wait any more."""
    clock = MadeUpClock()
    layer = Layer(clock, 1.0 if side.rank == 0 else 2.0)
    sampler = ShareBatchSampler(400, Shares.equal(20, side.size), rank=side.rank)
    balance = Balance(sampler, layer, warm_up=1, steps=1, clock=clock)
    changes = []
    for step, indices in enumerate(sampler):
        if side.rank == 0 and len(indices) > 10:
            layer._seconds = 1.5
        layer(torch.ones(len(indices), WIDTH)).sum().backward()
        if shares := balance.step(len(indices)):
            changes.append((step, shares.counts))
    return changes, balance.is_over


def test_shares_are_measured_again_once_nobody_waits_any_more():
    for changes, is_over in values(run_ranks(train_faster_while_waiting, ("nvidia", "amd"))):
        assert changes == [(1, (13, 7)), (3, (11, 9))]
        assert is_over


def fail_to_measure(side: Side) -> list[str]:
    said = []
    sampler = ShareBatchSampler(40, Shares((10,)), rank=0)
    try:
        Balance(sampler, every=2, steps=3, tolerance=1.5)
    except UserError as error:
        said.append(str(error))
    sampler = ShareBatchSampler(40, Shares((3, 2)), rank=side.rank)
    layer = nn.Linear(2, 2)
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile()
    try:
        Balance(sampler, compiled)
    except UserError as error:
        said.append(str(error))
    balance = Balance(sampler, layer, warm_up=0, steps=1)
    if side.rank == 0:
        layer(torch.ones(1, 2)).sum().backward()
    try:
        balance.step(1)
    except UserError as error:
        said.append(str(error))
    return said


def test_all_that_is_wrong_is_said_at_once_and_by_every_rank():
    ranks = values(run_ranks(fail_to_measure, ("nvidia", "amd")))
    for of_balance, of_compiled, of_step in ranks:
        for words in ("every 2 is less", "tolerance 1.5", "1 rank and the group has 2", "no mod"):
            assert words in of_balance
        assert "put torch.compile(layer) in its place" in of_compiled
        assert "nothing was measured on ranks [1]" in of_step
