"""Linear layers in fp8: how close their products are, what becomes of edge values, how delayed
scales follow from maxima, and which layers are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.mlp import MLP

from hetero.errors import HeteroError, UserError
from hetero.tools.operators.recording import built_model
from megatron.hetero import fp8
from megatron.hetero.fp8_operands import (
    ROWWISE,
    TENSORWISE,
    Recipe,
    Types,
    require_device,
)
from megatron.hetero.fp8_scaling import LayerScaling
from megatron.hetero.kernels import AccumulatingWgrad, DelayedWgrad
from tests.forked_ranks import ForkedRanks, values
from tests.gpus import NEEDS_A_GPU
from tests.megatron.fp8_cases import (
    CPU,
    OUTPUTS,
    SCALINGS,
    TOKENS,
    TYPES,
    WIDTH,
    Delayed,
    backward,
    decibels,
    grouped_linear,
    matrices,
    recipe,
)
from tests.megatron.launches import parsed


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_products_are_close_to_those_in_float64(types: Types, scaling: str) -> None:
    """Of e4m3 25 dB and more, of gradients in e5m2, which has a bit less, 22 dB."""
    x, weight, grad = matrices()
    layer = LayerScaling("fc1", recipe(types, scaling))
    output = backward(layer, grad, x, weight)
    assert x.grad is not None
    assert weight.grad is not None
    assert output.dtype == x.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert decibels(output, x.double() @ weight.double().t()) > 25
    assert decibels(x.grad, grad.double() @ weight.double()) > 22
    assert decibels(weight.grad, grad.double().t() @ x.double()) > 22
    assert layer.products == {"forward": 1, "input_gradient": 1, "weight_gradient": 1}


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_gradients_in_e4m3_are_as_close_as_outputs(types: Types) -> None:
    x, weight, grad = matrices()
    layer = LayerScaling("fc1", Recipe(TENSORWISE, types.e4m3, types.e4m3))
    backward(layer, grad, x, weight)
    assert x.grad is not None
    assert weight.grad is not None
    assert decibels(x.grad, grad.double() @ weight.double()) > 25
    assert decibels(weight.grad, grad.double().t() @ x.double()) > 25


def test_weight_gradients_in_bf16_are_those_of_matmul_and_not_counted() -> None:
    x, weight, grad = matrices()
    layer = LayerScaling("fc1", recipe(TYPES["fn"], weight_gradient=False))
    backward(layer, grad, x, weight)
    assert weight.grad is not None
    assert torch.equal(weight.grad, grad.t().matmul(x.detach()))
    assert layer.products == {"forward": 1, "input_gradient": 1, "weight_gradient": 0}


def test_a_bias_is_added_and_has_the_sum_of_the_gradients() -> None:
    x, weight, grad = matrices()
    bias = torch.full((OUTPUTS,), 8.0, dtype=torch.bfloat16, requires_grad=True)
    layer = LayerScaling("fc1", recipe(TYPES["fn"]))
    output = fp8.linear(layer, x.view(8, 8, WIDTH), weight, bias, training=True)
    output.backward(grad.view(8, 8, OUTPUTS))
    assert output.shape == (8, 8, OUTPUTS)
    plain = fp8.linear(layer, x, weight, None, training=True)
    assert torch.equal(output.detach().view(TOKENS, OUTPUTS), (plain + 8.0).detach())
    assert bias.grad is not None
    assert torch.equal(bias.grad, grad.sum(dim=0))


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-the-input-gradient"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_weight_gradients_are_added_to_float32_buffers(scaling: str, later: bool) -> None:
    x, weight, grad = matrices()
    buffer = torch.ones(OUTPUTS, WIDTH)
    weight.main_grad = buffer  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    wgrad = DelayedWgrad(copies_inputs=False) if later else AccumulatingWgrad()
    layer = LayerScaling("fc1", recipe(TYPES["fn"], scaling))
    with mock.patch.object(fp8, "installed_weight_gradient", return_value=wgrad):
        backward(layer, grad * 1e5, x, weight, gradient_accumulation_fusion=True)
    if isinstance(wgrad, DelayedWgrad):
        assert torch.equal(buffer, torch.ones_like(buffer))
        assert layer.products["weight_gradient"] == 0
        wgrad.compute()
    assert decibels(buffer - 1, (grad * 1e5).double().t() @ x.double()) > 22
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert layer.products["weight_gradient"] == 1


# Products of a real layer.

LAYER = (
    "--bf16 --num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 "
    "--seq-length 64 --max-position-embeddings 64 --padded-vocab-size 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
)
TRAINED_STEPS = 12
KINDS = "output", "input_gradient", "weight_gradient"


def letters(args: Any, step: int) -> torch.Tensor:
    """A micro-batch of English, a token a letter, and one more."""
    length = args.seq_length + 1
    text = "".join(topics[name] for name in sorted(topics)[:40]).encode("ascii", "ignore")
    begins = [(step * args.micro_batch_size + n) * length for n in range(args.micro_batch_size)]
    return torch.stack([torch.tensor(list(text[begin : begin + length])) for begin in begins])


def trained_layer(flags: str, vendor: str) -> tuple[dict[str, dict[str, torch.Tensor]], float]:
    """Of each linear layer of a model's last layer, in the last of a few steps of training: input,
    weight and output gradient, and the products in fp8; and how many tensors that step clipped."""
    args = parsed(f"{LAYER} {flags}")
    found: dict[str, dict[str, torch.Tensor]] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        own = found[name] = {}

        def after(_: object, inputs: tuple[torch.Tensor, ...], outputs: Any) -> None:
            x, output = inputs[0], outputs[0]
            own.update(x=x.detach(), weight=module.weight.detach().clone(), output=output.detach())  # type: ignore[operator]
            x.register_hook(lambda grad: own.update(input_gradient=grad))
            output.register_hook(lambda grad: own.update(grad=grad))

        module.register_forward_hook(after)

    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    with built_model(args, CPU) as (chunk, _):
        torch.manual_seed(3)
        for parameter in chunk.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        layers = fp8.install(
            args,
            [chunk],
            [0],
            vendor=vendor,
            group=alone,  # type: ignore[arg-type]
            device=CPU,
            fuses_mlps=False,
        )
        for name, module in chunk.named_modules():
            if name.startswith("decoder.layers.1.") and hasattr(module, "fp8"):
                watch(name.removeprefix("decoder.layers.1."), module)
        optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-3)
        positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
        for step in range(TRAINED_STEPS):
            tokens = letters(args, step)
            optimizer.zero_grad()
            chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
            for name, own in found.items():
                weight = chunk.get_submodule(f"decoder.layers.1.{name}").weight
                own["weight_gradient"] = weight.grad.clone()
            layers.take_clipped()
            layers.end_step()
            optimizer.step()
            layers.weights_changed()
    return found, float(layers.take_clipped())


def ratios(found: dict[str, dict[str, torch.Tensor]]) -> dict[tuple[str, str], float]:
    """Decibels of each product of each layer."""
    in_decibels = {}
    for layer, own in found.items():
        x, weight, grad = (own[of].double().flatten(0, -2) for of in ("x", "weight", "grad"))
        exact = (x @ weight.t(), grad @ weight, grad.t() @ x)
        for kind, expected in zip(KINDS, exact, strict=True):
            in_decibels[layer, kind] = decibels(own[kind].reshape(expected.shape), expected)
    return in_decibels


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-recipe tensorwise",
        "--fp8-recipe rowwise",
        "--fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    ],
    ids=["tensorwise", "rowwise", "delayed"],
)
@pytest.mark.parametrize("vendor", ["nvidia", "amd"], ids=["fn", "fnuz"])
def test_every_product_of_a_trained_layer_is_close_to_that_in_float64(
    vendor: str, flags: str
) -> None:
    """With the activations and gradients of a backward pass, whose rows differ in magnitude."""
    found, _ = trained_layer(f"--fp8-format hybrid {flags}", vendor)
    assert sorted(found) == sorted(LINEAR)
    for (layer, kind), ratio in ratios(found).items():
        assert ratio > (25 if kind == "output" else 22), (layer, kind)


@pytest.mark.parametrize("vendor", ["nvidia", "amd"], ids=["fn", "fnuz"])
def test_products_that_clipping_has_made_worse_are_counted(vendor: str) -> None:
    """The maximum of one step alone does not reach gradients that grow from step to step."""
    found, clipped = trained_layer("--fp8-format hybrid --fp8-recipe delayed", vendor)
    worse = {kind for (_, kind), ratio in ratios(found).items() if ratio < 22}
    assert worse == {"input_gradient"}
    assert clipped > 0


# Ranks that share sequences.

HETERO = "hetero"
PATIENCE = 120.0


@contextmanager
def joined(rank: int, size: int, folder: str, backend: str) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, of gloo, NCCL or the backend across vendors."""
    import hetero.collectives.process_group  # noqa: F401  registers its backend

    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if backend == "nccl" else "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    try:
        group = dist.new_group(backend=backend)
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def layers_of(own: Recipe, group: Any, device: torch.device) -> tuple[fp8.Fp8Layers, LayerScaling]:
    """The column-parallel layer of a rank, and those that agree on its scales."""
    module = torch.nn.Module()
    with mock.patch.dict(fp8._CLASSES, {torch.nn.Module: torch.nn.Module}):
        layers = fp8.Fp8Layers([("fc1", module)], own, group=group, device=device)
    return layers, module.fp8  # type: ignore[return-value]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def answer(rank: int, asked: Connection) -> None:
    """One of two ranks, which import megatron-core once for all that they are asked to run."""
    with suppress(EOFError):
        while True:
            function, *arguments = asked.recv()
            try:
                asked.send((function(rank, *arguments), None))
            except Exception as error:
                asked.send((None, f"{type(error).__name__}: {error}"))


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ForkedRanks]:
    with closing(ForkedRanks(answer, [(0,), (1,)])) as ranks:
        yield ranks


def shared_sequences(
    rank: int, size: int, folder: str, backend: str, own: Recipe, steps: int
) -> tuple[list[str], list[int]]:
    """Where the parts of a sequence that a rank computes differ from the same of the gathered one,
    and the bytes that it gathered."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    gathered: list[int] = []
    gather = dist.all_gather_into_tensor

    def watched(output: torch.Tensor, part: torch.Tensor, **how: Any) -> Any:
        gathered.append(part.nbytes)
        return gather(output, part, **how)

    def buffer(shape: list[int], dtype: torch.dtype, _: str) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    memory = SimpleNamespace(get_tensor=buffer)
    found = []
    with (
        joined(rank, size, folder, backend) as group,
        mock.patch.object(fp8, "get_global_memory_buffer", return_value=memory),
        mock.patch.object(dist, "all_gather_into_tensor", watched),
    ):
        layers, layer = layers_of(own, group, device)
        alone, whole = layers_of(own, group, device)
        for step in range(steps):
            x, weight, _ = matrices(device)
            # Each rank has rows of its own magnitude, and weights and gradients of its own.
            factor = torch.logspace(-1, 1, TOKENS, base=2, device=device).unsqueeze(1) * (step + 1)
            x = (x.detach() * factor).to(torch.bfloat16)
            if step == steps - 1:
                x[3, 5] = math.inf
            own_weight = (weight.detach() * (rank + 1)).requires_grad_()
            grad = matrices(device)[2] * (rank + 2)
            part = x.chunk(size)[rank].view(-1, 2, WIDTH).clone().requires_grad_()
            ours = fp8.linear(
                *(layer, part, own_weight, None),
                training=True,
                sequence_parallel=True,
                tp_group=group,
            )
            ours.backward(grad.view(ours.shape))
            total = x.clone().requires_grad_()
            same_weight = own_weight.detach().clone().requires_grad_()
            expected = backward(whole, grad, total, same_weight)
            assert total.grad is not None
            dist.all_reduce(total.grad, group=group)
            pairs = (
                (ours.detach().view(expected.shape), expected),
                (part.grad, total.grad.chunk(size)[rank].view(part.shape)),
                (own_weight.grad, same_weight.grad),
            )
            differing = zip(KINDS, pairs, strict=True)
            found += [f"{kind} in {step}" for kind, two in differing if not same(*two)]
            for each in (layers, alone):
                each.end_step()
                each.weights_changed()
        if layers._histories is not None:
            assert alone._histories is not None
            if not torch.equal(layers._histories.maxima, alone._histories.maxima):
                found.append("maxima")
    return found, gathered


GATHERED = [
    *((scaling, "gloo", name) for scaling in SCALINGS for name in TYPES),
    *((scaling, HETERO, "fnuz") for scaling in SCALINGS),
    *(
        pytest.param(scaling, "nccl", "fn", marks=[pytest.mark.gpu, NEEDS_A_GPU])
        for scaling in SCALINGS
    ),
]


@pytest.mark.parametrize(("scaling", "backend", "name"), GATHERED)
def test_ranks_gather_what_they_cast_and_compute_what_one_does_of_the_whole(
    scaling: str, backend: str, name: str, two_ranks: ForkedRanks, tmp_path: Path
) -> None:
    """Half the bytes of bf16, forward and backward; with rows that are scaled, all of them. The
    last step has an element that is infinite, on one of the ranks."""
    size, steps = 2, 4
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip("needs two GPUs")
    own = recipe(TYPES[name], scaling, history=2)
    two_ranks.ask(shared_sequences, size, str(tmp_path), backend, own, steps)
    part = TOKENS // size * WIDTH
    expected = [part * (2 if scaling == ROWWISE else 1)] * 2 * steps
    outcomes = two_ranks.outcomes(patience=PATIENCE, until_end=False)
    for differing, gathered in values(outcomes):
        assert differing == []
        assert gathered == expected


# What a tensor may hold.


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_zeros_have_zeros(types: Types, scaling: str) -> None:
    _, weight, grad = matrices()
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    output = backward(LayerScaling("fc1", recipe(types, scaling)), grad, x, weight)
    assert not output.any()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_what_is_not_finite_stays_so_in_its_row_as_in_bf16(
    types: Types, scaling: str, value: float
) -> None:
    x, weight, _ = matrices()
    x = x.detach()
    x[3, 5] = value
    layer = LayerScaling("fc1", recipe(types, scaling))
    output = fp8.linear(layer, x, weight.detach(), None, training=True)
    assert output[3].isnan().all()
    assert output[torch.arange(TOKENS) != 3].isfinite().all()


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_a_gradient_that_is_not_finite_makes_both_gradients_so(
    types: Types, scaling: str, value: float
) -> None:
    x, weight, grad = matrices()
    grad[3, 5] = value
    backward(LayerScaling("fc1", recipe(types, scaling)), grad, x, weight)
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad[3].isnan().all()
    assert x.grad[torch.arange(TOKENS) != 3].isfinite().all()
    assert weight.grad[5].isnan().all()
    assert weight.grad[torch.arange(OUTPUTS) != 5].isfinite().all()


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("factor", [2.0**-120, 2.0**100], ids=["tiny", "large"])
def test_tensors_of_any_magnitude_are_as_close(types: Types, factor: float) -> None:
    x, weight, _ = matrices()
    scaled = (x.detach().double() * factor).to(torch.bfloat16)
    layer = LayerScaling("fc1", recipe(types))
    output = fp8.linear(layer, scaled, weight.detach(), None, training=True)
    assert decibels(output, scaled.double() @ weight.detach().double().t()) > 25


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_one_huge_value_costs_the_others_their_bits_unless_rows_are_scaled(types: Types) -> None:
    x, weight, _ = matrices()
    x, weight = x.detach(), weight.detach()
    x[0, 0] = 1e8
    others = x.double()[1:] @ weight.double().t()
    found = {}
    for scaling in (TENSORWISE, ROWWISE):
        output = fp8.linear(
            LayerScaling("fc1", recipe(types, scaling)), x, weight, None, training=True
        )
        assert output.isfinite().all()
        found[scaling] = output[1:]
    assert not found[TENSORWISE].any()
    assert decibels(found[ROWWISE], others) > 25


# Layers of a model.


def chosen(flags: str) -> list[str]:
    """The names of the layers that a model with these flags has in fp8."""
    args = parsed(f"--bf16 --fp8-format hybrid --padded-vocab-size 128 {flags}")
    with built_model(args, CPU) as (chunk, _):
        layers = fp8.install(args, [chunk], [0], vendor="amd", group=None, device=CPU)  # type: ignore[arg-type]
        outside = [n for n, m in chunk.named_modules() if "output_layer" in n and hasattr(m, "fp8")]
        assert not outside
        return [layer.name for layer in layers._layers]


LINEAR = (
    *("self_attention.linear_proj", "self_attention.linear_qkv"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)


GATED = "--num-layers 1 --hidden-size 64 --ffn-hidden-size 96 --swiglu --disable-bias-linear"


def gated_mlp(flags: str = "") -> torch.nn.Module:
    args = parsed(f"--bf16 --fp8-format e4m3 --padded-vocab-size 128 {GATED} {flags}")
    with built_model(args, CPU) as (chunk, _):
        fp8.install(args, [chunk], [0], vendor="nvidia", group=None, device=CPU)  # type: ignore[arg-type]
        mlp: torch.nn.Module = chunk.decoder.layers[0].mlp
        generator = torch.Generator().manual_seed(3)
        for parameter in mlp.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data = drawn.to(torch.bfloat16)
        return mlp


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_gated_mlp_is_close_to_float64_forward_and_backward(scaling: str) -> None:
    mlp = gated_mlp(f"--fp8-recipe {scaling}")
    assert isinstance(mlp, fp8.Fp8GatedMLP)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(8, 4, 64, generator=generator).to(torch.bfloat16).requires_grad_()
    grad = torch.randn(8, 4, 64, generator=generator).to(torch.bfloat16)
    output, bias = mlp(x)
    output.backward(grad)
    assert bias is None
    exact = [p.detach().double().requires_grad_() for p in (x, *mlp.parameters())]
    gate, up = (exact[0] @ exact[1].t()).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ exact[2].t()
    expected.backward(grad.double())
    assert decibels(output, expected) > 22
    for found, own in zip((x, *mlp.parameters()), exact, strict=True):
        assert found.grad is not None
        assert own.grad is not None
        assert decibels(found.grad, own.grad) > 20
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        assert layer.fp8.products == {"forward": 1, "input_gradient": 1, "weight_gradient": 1}


def test_a_gated_mlp_waits_for_its_weights() -> None:
    """As megatron-core's hooks do where weights are gathered while layers compute."""
    mlp = gated_mlp("--fp8-recipe tensorwise")
    waited = []
    for name in ("linear_fc1", "linear_fc2"):
        layer = getattr(mlp, name)
        layer.register_forward_pre_hook(lambda *_, name=name: waited.append(name))
    mlp(torch.ones(16, 1, 64, dtype=torch.bfloat16))
    assert waited == ["linear_fc1", "linear_fc2"]


@pytest.mark.parametrize("flags", ["--no-fp8-wgrad", "--no-bias-swiglu-fusion"])
def test_a_gated_mlp_is_left_in_parts(flags: str) -> None:
    mlp = gated_mlp(flags)
    assert type(mlp) is MLP
    assert isinstance(mlp.linear_fc1, fp8.Fp8ColumnParallelLinear)


def test_attention_and_mlp_of_every_layer_are_chosen() -> None:
    names = chosen("--num-layers 3 --fp8-recipe tensorwise")
    expected = {f"decoder.layers.{n}.{part}" for n in range(3) for part in LINEAR}
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [1, 2, 3, 4, 5, 6]),
        ("--num-layers-at-start-in-bf16 3", [3, 4, 5, 6]),
        ("--num-layers-at-end-in-bf16 0", [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_first_and_last_layers_can_stay_in_bf16(flags: str, expected: list[int]) -> None:
    names = chosen(f"--fp8-recipe tensorwise --first-last-layers-bf16 {flags}")
    assert sorted({int(name.split(".")[2]) for name in names}) == expected


MIXTURE = "--fp8-recipe tensorwise --num-experts 4 --disable-bias-linear"


def test_experts_are_chosen_and_routers_are_not() -> None:
    names = chosen(f"--num-layers 1 {MIXTURE} --moe-shared-expert-intermediate-size 32")
    mlp = {name.removeprefix("decoder.layers.0.mlp.") for name in names if ".mlp." in name}
    parts = ("linear_fc1", "linear_fc2")
    assert mlp == {f"{of}.{part}" for of in ("experts", "shared_experts") for part in parts}


def test_experts_of_the_first_and_last_layers_can_stay_in_bf16() -> None:
    names = chosen(f"--num-layers 3 {MIXTURE} --first-last-layers-bf16")
    assert {name for name in names if ".experts." in name} == {
        f"decoder.layers.1.mlp.experts.linear_fc{number}" for number in (1, 2)
    }


def test_experts_stay_in_bf16_where_torch_has_no_grouped_product() -> None:
    without = mock.patch.object(fp8, "multiplies_groups", return_value=False)
    with without:
        names = chosen(f"--num-layers 1 {MIXTURE} --moe-ffn-hidden-size 24")
    assert {name.rsplit(".", 1)[1] for name in names} == {"linear_proj", "linear_qkv"}


def install_on_a_rank(rank: int, folder: str) -> str:
    """What the layers say of a rank; the first alone has a GPU with grouped products."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    experts = torch.nn.ModuleDict({"linear_fc1": grouped_linear()})
    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
    chunk = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    args = parsed(f"--bf16 --fp8-format hybrid --num-layers 1 {MIXTURE}")
    with mock.patch.object(fp8, "multiplies_groups", return_value=rank == 0):
        layers = fp8.install(
            args,
            [torch.nn.ModuleDict({"decoder": chunk})],
            [0],
            vendor="nvidia",
            group=dist.group.WORLD,  # type: ignore[arg-type]
            device=CPU,
        )
    dist.destroy_process_group()
    return layers.describe()


def test_all_ranks_of_a_stage_leave_experts_in_bf16_if_one_has_to(
    two_ranks: ForkedRanks, tmp_path: Path
) -> None:
    """Delayed maxima are agreed layer by layer."""
    two_ranks.ask(install_on_a_rank, str(tmp_path))
    for said in values(two_ranks.outcomes(patience=PATIENCE, until_end=False)):
        assert "1 grouped linear layer of experts in bf16, for lack of" in said


def test_sizes_of_experts_that_gpus_do_not_take_are_refused() -> None:
    with pytest.raises(UserError, match=r"experts\.linear_fc1 is 24 x 64 on a rank"):
        chosen(f"--num-layers 1 {MIXTURE} --moe-ffn-hidden-size 24")


def test_latent_attention_and_mtp_layers_are_chosen() -> None:
    names = chosen(
        "--num-layers 1 --fp8-recipe tensorwise --multi-latent-attention --q-lora-rank 32 "
        "--qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16 --mtp-num-layers 1 "
        "--position-embedding-type rope"
    )
    parts = {name.rsplit(".", 1)[1] for name in names if name.startswith("mtp.")}
    down = {"linear_q_down_proj", "linear_kv_down_proj"}
    up = {"linear_q_up_proj", "linear_kv_up_proj", "linear_proj"}
    assert parts == {*down, *up, "linear_fc1", "linear_fc2", "eh_proj"}
    assert {name.rsplit(".", 1)[1] for name in names if "decoder" in name} == parts - {"eh_proj"}


def test_sizes_that_gpus_do_not_take_are_refused_all_at_once() -> None:
    with pytest.raises(UserError) as refused:
        chosen("--ffn-hidden-size 40 --micro-batch-size 1 --seq-length 24")
    first, second, third = refused.value.sentences
    assert "linear_fc1 is 40 x 64 on a rank" in first
    assert "linear_fc2 is 64 x 40" in second
    assert "24 tokens on a rank" in third


def test_a_layer_that_has_computed_in_bf16_ends_the_run() -> None:
    delayed = Delayed()
    layer = delayed.layer
    layer.products.update(forward=1, input_gradient=1)
    with pytest.raises(
        HeteroError, match=r"rank 3: decoder\.layers\.0\.mlp\.linear_fc1 has computed"
    ):
        delayed.layers.require_products(rank="rank 3")
    layer.products["weight_gradient"] = 1
    delayed.layers.require_products(rank="rank 3")


# Kernels of GPUs.


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_a_gpu_are_close_to_those_in_float64(scaling: str) -> None:
    device = torch.device("cuda")
    own = recipe(Types.of(device, "nvidia"), scaling)
    require_device(device, own)
    x, weight, grad = matrices(device)
    output = backward(LayerScaling("fc1", own), grad, x, weight)
    assert x.grad is not None
    assert weight.grad is not None
    assert decibels(output, x.double() @ weight.double().t()) > 25
    assert decibels(x.grad, grad.double() @ weight.double()) > 22
    assert decibels(weight.grad, grad.double().t() @ x.double()) > 22
