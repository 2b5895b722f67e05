"""Products of linear layers in 8-bit floating point (fp8), by torch alone, on both vendors.

megatron-core leaves fp8 to TransformerEngine, and without it trains in bf16 whatever its
configuration says. Here forward, input gradient and weight gradient of a linear layer are products
of `torch._scaled_mm`, and of experts forward and input gradient products of
`torch._scaled_grouped_mm` (`megatron.hetero.fp8_operands`). Weights, activations and gradients stay
in bf16 between products, so stages with different types can train together: MI300X and MI325X
(gfx942) have types of their own, whose names end in fnuz.

What is scaled at a time, and by which maximum (Micikevicius et al., arXiv:2209.05433):

- tensorwise: a tensor, by its own maximum;
- delayed: a tensor, by the largest maximum of the last steps, which saves a pass over it. These
  maxima are state of the training: buffers that are agreed over the ranks of a stage and saved;
- rowwise: each row of the left and each column of the right matrix, by its own maximum.

An expert's weight is a tensor, and so are the tokens of all experts of a rank; delayed scaling has
one maximum for all weights of a layer's experts.

An element that a delayed scale does not reach becomes the largest of the type; such tensors are
counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig

from hetero.errors import HeteroError, UserError
from hetero.plan import Plan
from hetero.plan.plan import NO_FP8
from hetero.text import counted
from megatron.hetero.checkpoint.tensor_names import AMAX_HISTORY
from megatron.hetero.core_private import installed_weight_gradient
from megatron.hetero.fp8_operands import (
    ALIGNMENT,
    DELAYED,
    GRADIENT,
    INPUT,
    ROWWISE,
    SWIGLU,
    SWIGLU_GRADIENT,
    Operand,
    Recipe,
    Types,
    casts_swiglu,
    multiplies_groups,
    require_device,
    transpose,
)
from megatron.hetero.fp8_scaling import (
    FORWARD,
    INPUT_GRADIENT,
    PRODUCTS,
    WEIGHT_GRADIENT,
    GroupedScaling,
    Histories,
    LayerScaling,
    agree_on_maximum,
)
from megatron.hetero.grouped_experts import GroupedLinear
from megatron.hetero.latent_attention import ReplicatedLinear
from megatron.hetero.weights import MTP, global_name, layer_of

_PRODUCTS, _CLIPPED = "fp8_products", "fp8_clipped_tensors"


@dataclass(frozen=True)
class _Call:
    """What megatron-core says to a linear layer besides the matrices."""

    scaling: LayerScaling
    adds_to_buffer: bool
    records: bool
    has_backward: bool
    reduces_input_gradient: bool = False
    gathers_sequence: bool = False
    group: dist.ProcessGroup | None = None

    def adds_to(self, weight: torch.Tensor) -> bool:
        """Whether the weight's gradient goes to its buffer."""
        return self.adds_to_buffer and hasattr(weight, "main_grad")

    @property
    def gathers_cast(self) -> bool:
        """Whether ranks that share sequences gather what they have cast: half the bytes.

        All ranks have one factor. With one for each row the transposed matrix has others, which
        depend on the rows of all ranks.
        """
        return self.gathers_sequence and self.scaling.recipe.scaling != ROWWISE


class _Linear(torch.autograd.Function):
    """megatron-core's LinearWithGradAccumulationAndAsyncCommunication with fp8 products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: _Call,
    ) -> torch.Tensor:
        scaling, rows, shape = call.scaling, x.reshape(-1, x.shape[-1]), [*x.shape[:-1], -1]
        if call.gathers_sequence:
            assert call.group is not None
            shape[0] *= call.group.size()
            if not call.gathers_cast:
                rows = _gather(rows, call)[0]
        # Where ranks share the sequence each keeps its part, and it is gathered again.
        keeps_transposed = scaling.recipe.weight_gradient and not call.gathers_sequence
        own, transposed = scaling.operands(
            INPUT,
            rows,
            transposed=keeps_transposed and call.has_backward and ctx.needs_input_grad[1],
            records=call.records,
            group=call.group if call.gathers_cast else None,
        )
        kept: tuple[torch.Tensor, ...] = (x,)
        if transposed is not None:
            kept = transposed.values, transposed.inverse
        elif call.gathers_cast and scaling.recipe.weight_gradient:
            kept = own.values, own.inverse
        if call.gathers_cast:
            own = Operand(_gather(own.values, call)[0], own.inverse)
        output = scaling.multiply(FORWARD, own, scaling.weight(weight)[0], x.dtype).view(shape)
        if bias is not None:
            output = output + bias
        ctx.call, ctx.weight, ctx.has_bias, ctx.shape = call, weight, bias is not None, x.shape
        ctx.save_for_backward(*kept)
        return output

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        call, weight, scaling = ctx.call, ctx.weight, ctx.call.scaling
        (grad_output,) = grads
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        is_fp8 = scaling.recipe.weight_gradient
        own, transposed = scaling.operands(
            GRADIENT, grad_rows, transposed=wants_weight and is_fp8, records=call.records
        )
        gathered = None
        if wants_weight and call.gathers_sequence:
            kept = ctx.saved_tensors[0]
            gathered = _gather(kept.reshape(-1, kept.shape[-1]), call, in_background=True)
        grad_input = whole = pending = None
        if wants_input:
            grad_input = whole = scaling.multiply(
                INPUT_GRADIENT, own, scaling.weight(weight)[1], grad_output.dtype
            ).view(*grad_output.shape[:-1], -1)
        if gathered is not None:
            gathered[1].wait()
        if whole is not None and call.gathers_sequence:
            grad_input = whole.new_empty(ctx.shape)
            pending = dist.reduce_scatter_tensor(
                grad_input, whole.contiguous(), group=call.group, async_op=True
            )
        elif whole is not None and call.reduces_input_gradient:
            pending = dist.all_reduce(whole, group=call.group, async_op=True)
        grad_weight = None
        if wants_weight:
            grad_weight = _weight_gradient(ctx, grad_rows, transposed, gathered)
        grad_bias = grad_rows.sum(dim=0) if ctx.has_bias else None
        if pending is not None:
            pending.wait()
        return grad_input, grad_weight, grad_bias, None


def _weight_gradient(
    ctx: Any,
    grad_rows: torch.Tensor,
    transposed_grad: Operand | None,
    gathered: tuple[torch.Tensor, Any] | None,
) -> torch.Tensor | None:
    """Adds it to the weight's buffer, or returns it."""
    call, weight = ctx.call, ctx.weight
    saved = ctx.saved_tensors
    if transposed_grad is None:
        total = saved[0] if gathered is None else gathered[0]
        rows = total.reshape(-1, total.shape[-1])
        if not call.adds_to(weight):
            return grad_rows.t().matmul(rows)
        installed_weight_gradient().wgrad_gemm_accum_fp32(rows, grad_rows, weight.main_grad)
        return _added(weight)
    if gathered is None:
        transposed = Operand(*saved)
    elif call.gathers_cast:
        transposed = Operand(transpose(gathered[0]), saved[1])
    else:
        _, turned = call.scaling.operands(INPUT, gathered[0], records=False)
        assert turned is not None
        transposed = turned
    return _give_weight_gradient(call, weight, transposed_grad, transposed)


def _give_weight_gradient(
    call: _Call, weight: Any, grad: Operand, x: Operand
) -> torch.Tensor | None:
    """Of transposed matrices: adds it to the weight's buffer, or returns it."""
    scaling = call.scaling
    if not call.adds_to(weight):
        return scaling.multiply(WEIGHT_GRADIENT, grad, x, weight.dtype)
    add = partial(scaling.add_weight_gradient, grad, x)
    installed_weight_gradient().add_product(add, weight.main_grad)
    return _added(weight)


def _added(weight: Any) -> torch.Tensor | None:
    """What megatron-core's hook wants as a gradient, and does not read."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _gather(
    rows: torch.Tensor, call: _Call, *, in_background: bool = False
) -> tuple[torch.Tensor, Any]:
    """The rows (n, k) of all ranks of the group, in a buffer that other layers use as well."""
    assert call.group is not None
    dtype = rows.dtype
    # Not every backend knows the 8-bit types, and all of them know bytes.
    sent = rows.contiguous().view(torch.uint8) if dtype.itemsize == 1 else rows.contiguous()
    shape = [len(rows) * call.group.size(), rows.shape[1]]
    buffer: torch.Tensor = get_global_memory_buffer().get_tensor(shape, sent.dtype, "mpu")
    pending = dist.all_gather_into_tensor(buffer, sent, group=call.group, async_op=in_background)
    return buffer.view(dtype), pending


def linear(
    scaling: LayerScaling,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    training: bool,
    gradient_accumulation_fusion: bool = False,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    **_: Any,
) -> torch.Tensor:
    """x (..., k) times weight (n, k) transposed, plus the bias (n,): (..., n).

    The keywords are those of megatron-core's `_forward_impl`.
    """
    call = _Call(
        scaling=scaling,
        adds_to_buffer=gradient_accumulation_fusion,
        reduces_input_gradient=allreduce_dgrad,
        gathers_sequence=sequence_parallel,
        group=tp_group,
        records=training,
        has_backward=torch.is_grad_enabled(),
    )
    output: torch.Tensor = _Linear.apply(x, weight, bias, call)
    return output


class _GatedMLP(torch.autograd.Function):
    """A gated MLP with fp8 products, on a rank that has it whole.

    SwiGLU and its gradient are computed where they are cast, and are not written in 16 bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_up: torch.Tensor,
        weight_down: torch.Tensor,
        up: _Call,
        down: _Call,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        keeps, needs = up.has_backward, ctx.needs_input_grad
        own, turned_x = up.scaling.operands(
            INPUT, rows, transposed=keeps and needs[1], records=up.records
        )
        gate_up = up.scaling.multiply(FORWARD, own, up.scaling.weight(weight_up)[0], x.dtype)
        own, turned = down.scaling.operands(
            INPUT, gate_up, form=SWIGLU, transposed=keeps and needs[2], records=down.records
        )
        output = down.scaling.multiply(FORWARD, own, down.scaling.weight(weight_down)[0], x.dtype)
        ctx.calls, ctx.weights, ctx.shape = (up, down), (weight_up, weight_down), x.shape
        kept = [(None, None) if t is None else (t.values, t.inverse) for t in (turned_x, turned)]
        ctx.save_for_backward(gate_up, *kept[0], *kept[1])
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (up, down), (weight_up, weight_down) = ctx.calls, ctx.weights
        gate_up, *kept = ctx.saved_tensors
        wants_input, wants_up, wants_down = ctx.needs_input_grad[:3]
        dtype = grads[0].dtype
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        own, turned = down.scaling.operands(
            GRADIENT, rows, transposed=wants_down, records=down.records
        )
        grad = down.scaling.multiply(
            INPUT_GRADIENT, own, down.scaling.weight(weight_down)[1], dtype
        )
        grad_down = grad_up = grad_input = None
        if turned is not None:
            grad_down = _give_weight_gradient(down, weight_down, turned, Operand(*kept[2:]))
        own, turned = up.scaling.operands(
            GRADIENT,
            grad,
            gate_up,
            form=SWIGLU_GRADIENT,
            transposed=wants_up,
            records=up.records,
        )
        if wants_input:
            grad_input = up.scaling.multiply(
                INPUT_GRADIENT, own, up.scaling.weight(weight_up)[1], dtype
            ).view(ctx.shape)
        if turned is not None:
            grad_up = _give_weight_gradient(up, weight_up, turned, Operand(*kept[:2]))
        return grad_input, grad_up, grad_down, None, None


class Fp8ColumnParallelLinear(ColumnParallelLinear):
    """megatron-core's, with fp8 products."""

    fp8: LayerScaling

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: Any = None, **how: Any
    ) -> torch.Tensor:
        return linear(self.fp8, input, weight, bias, training=self.training, **how)


class Fp8RowParallelLinear(RowParallelLinear):
    """megatron-core's, with fp8 products."""

    fp8: LayerScaling

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: Any = None, **how: Any
    ) -> torch.Tensor:
        return linear(self.fp8, input, weight, bias, training=self.training, **how)


class Fp8ReplicatedLinear(ReplicatedLinear):
    """Latent attention's projection that every rank has whole, with fp8 products."""

    fp8: LayerScaling

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return linear(self.fp8, x, self.weight, None, training=self.training), None


class _HeldWeight(torch.nn.Module):
    """A linear layer of an `Fp8GatedMLP`, whose products are computed there."""

    weight: torch.nn.Parameter

    def forward(self) -> torch.nn.Parameter:
        """The weight; hooks that wait for it run as before a product."""
        return self.weight


class Fp8HeldColumnLinear(_HeldWeight, ColumnParallelLinear):
    fp8: LayerScaling


class Fp8HeldRowLinear(_HeldWeight, RowParallelLinear):
    fp8: LayerScaling


class Fp8GatedMLP(MLP):
    """megatron-core's, whole on a rank, with fp8 products, SwiGLU and no biases."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        layers = self.linear_fc1, self.linear_fc2
        up, down = (
            _Call(
                scaling=layer.fp8,
                adds_to_buffer=layer.gradient_accumulation_fusion,
                records=self.training,
                has_backward=torch.is_grad_enabled(),
            )
            for layer in layers
        )
        output: torch.Tensor = _GatedMLP.apply(hidden_states, layers[0](), layers[1](), up, down)
        return output, None

    @staticmethod
    def takes(mlp: torch.nn.Module, recipe: Recipe) -> bool:
        """Whether it can compute a module of a model, whose linear layers are to be in fp8."""
        if type(mlp) is not MLP or not recipe.weight_gradient:
            return False
        config: TransformerConfig = mlp.config
        return bool(
            config.gated_linear_unit
            and config.activation_func is F.silu
            and config.activation_func_clamp_value is None
            and not config.add_bias_linear
            and not config.glu_linear_offset
            and config.tensor_model_parallel_size == 1
        )


_CLASSES = {
    ColumnParallelLinear: Fp8ColumnParallelLinear,
    RowParallelLinear: Fp8RowParallelLinear,
    ReplicatedLinear: Fp8ReplicatedLinear,
}


class CountedLayer(Protocol):
    """A linear layer that tells what it has computed in fp8."""

    name: str
    products: dict[str, int]

    def forget_weight(self) -> None: ...

    def lacks(self) -> str | None: ...


class Fp8Layers:
    """The linear layers of a rank whose products are fp8; none where the flags ask for none.

    Those of experts count as one layer, which has their weights together.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, torch.nn.Module]] = (),
        recipe: Recipe | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        left_out: int = 0,
    ) -> None:
        """Switches the modules, named as in the whole model, to fp8.

        `group`: the ranks of the stage, which agree on delayed scales. `left_out`: layers of
        experts that stay in bf16, because torch has no grouped product for a GPU of the stage.
        """
        self.recipe, self._group, self._left_out = recipe, group, left_out
        self._layers: list[CountedLayer] = []
        self._histories: Histories | None = None
        self._told = 0
        self._what = ""
        if recipe is None:
            return
        layers = []
        for name, module in modules:
            if isinstance(module, GroupedLinear):
                layer: LayerScaling = GroupedScaling(name, recipe)
                module.products = layer  # type: ignore[assignment]
            else:
                module.__class__ = _CLASSES[type(module)]  # type: ignore[assignment]
                layer = LayerScaling(name, recipe)
            module.fp8 = layer  # type: ignore[assignment]
            layers.append(layer)
        self._layers += layers
        if recipe.scaling == DELAYED and layers:
            self._histories = Histories(layers, recipe, device)
            for (_, module), maxima in zip(modules, self._histories.maxima, strict=True):
                module.register_buffer(AMAX_HISTORY.removeprefix("."), maxima)

    @classmethod
    def watching(cls, layers: Sequence[CountedLayer], recipe: Recipe, *, what: str) -> Fp8Layers:
        """Layers that are in fp8 by themselves, and `what` the log is to say of them."""
        watched = cls(recipe=recipe)
        watched._layers += layers
        watched._what = what
        return watched

    def __len__(self) -> int:
        return len(self._layers)

    def end_step(self) -> None:
        """Call after the backward passes of a step, and before the optimizer's. Collective over
        the ranks of a stage with delayed scaling."""
        if self._histories is not None:
            assert self._group is not None
            self._histories.end_step(self._group)

    def weights_changed(self) -> None:
        """Call after the optimizer's step: weights are cast anew."""
        for layer in self._layers:
            layer.forget_weight()

    def restart(self) -> None:
        """Call before the first step, once a checkpoint has been loaded."""
        self.weights_changed()
        if self._histories is not None:
            self._histories.restart()
        for layer in self._layers:
            layer.products = dict.fromkeys(PRODUCTS, 0)
        self._told = 0

    def products(self) -> dict[str, int]:
        """Products of this rank since `restart`, by kind."""
        return {kind: sum(layer.products[kind] for layer in self._layers) for kind in PRODUCTS}

    def take_products(self) -> int:
        """Products of this rank since the last call."""
        total = sum(self.products().values())
        told, self._told = self._told, total
        return total - told

    def require_products(self, *, rank: str) -> None:
        """Raise HeteroError if a layer has not computed in fp8 what it should have, in a step."""
        for layer in self._layers:
            kind = layer.lacks()
            if kind is not None:
                raise HeteroError(
                    f"{rank}: {layer.name} has computed no {kind.replace('_', ' ')} in fp8, which "
                    "--fp8-format asks for; this is an error of the program: train without "
                    "--fp8-format, and report it"
                )

    def take_clipped(self) -> torch.Tensor:
        """How many tensors of the stage delayed scales have not reached since the last call, ();
        0 on all ranks of a stage but one."""
        if self._histories is None or self._group is None or self._group.rank():
            return torch.zeros(())
        taken = self._histories.clipped.clone()
        self._histories.clipped.zero_()
        return taken

    def describe(self) -> str:
        """For the log."""
        if self.recipe is None:
            return ""
        grouped = [layer for layer in self._layers if isinstance(layer, GroupedScaling)]
        linear = counted(len(self) - len(grouped), "linear layer")
        parts = [f"{self.recipe.type_names()} in {linear} {self._what}".rstrip()]
        if grouped:
            of_experts = counted(len(grouped), "grouped linear layer")
            parts.append(f"{grouped[0].recipe.type_names()} in {of_experts} of experts")
        if self._left_out:
            of_experts = counted(self._left_out, "grouped linear layer")
            parts.append(f"{of_experts} of experts in bf16, for lack of a grouped product in fp8")
        return " and ".join(parts)


class Fp8Counts:
    """What is told of fp8 in each iteration, of all ranks."""

    def __init__(self, args: argparse.Namespace, plan: Plan, layers: Fp8Layers) -> None:
        self._layers = layers
        is_used = any(mesh.fp8 not in (None, NO_FP8) for mesh in plan.meshes)
        names = (_PRODUCTS, _CLIPPED) if args.fp8_recipe == DELAYED else (_PRODUCTS,)
        self._names = names if is_used else ()
        self.size = len(self._names)

    def take(self, micro_batches: int, device: torch.device) -> torch.Tensor:
        """This rank's summands of what `read` reads since the last call, float64 (size,)."""
        taken = torch.zeros(self.size, dtype=torch.float64, device=device)
        if self.size:
            taken[0] = self._layers.take_products()
        if self.size > 1:
            taken[1] = self._layers.take_clipped()
        return taken

    def read(self, summed: Sequence[float]) -> dict[str, float]:
        """By name, from the sum over all ranks: products in fp8, and the tensors in which a delayed
        scale has not reached the largest element."""
        return dict(zip(self._names, summed, strict=True))


def install(
    args: argparse.Namespace,
    chunks: Sequence[torch.nn.Module],
    first_layers: Sequence[int],
    *,
    vendor: str,
    group: dist.ProcessGroup,
    device: torch.device,
    fuses_mlps: bool = True,
) -> Fp8Layers:
    """Switch the linear layers of a rank's chunks to fp8, where the flags ask for it.

    Attention and MLP of every layer, experts and MTP layers. The output layer and routers stay as
    they are, and so do the first and last layers that --first-last-layers-bf16 names, and experts
    where torch has no grouped product for a GPU of the stage. Call it once the chunks are on
    `device` and in bf16. Collective over `group`, the ranks of the stage, if there are experts.
    `fuses_mlps`: whether gated MLPs are computed as one where that can be; otherwise hooks see what
    goes into each of their two layers and comes out.
    Raises UserError for sizes that GPUs do not take, HeteroError if the device cannot multiply fp8.
    """
    recipe = Recipe.of(args, Types.of(device, vendor))
    if recipe is None:
        return Fp8Layers()
    modules = list(_linear_modules(args, chunks, first_layers))
    found = len(modules)
    has_groups = any(isinstance(module, GroupedLinear) for _, module in modules)
    if has_groups and not _all_multiply_groups(device, recipe, group):
        modules = [pair for pair in modules if not isinstance(pair[1], GroupedLinear)]
    require_sizes(args, modules)
    if modules:
        require_device(device, recipe)
    left_out = found - len(modules)
    layers = Fp8Layers(modules, recipe, group=group, device=device, left_out=left_out)
    dtypes = (recipe.forward, recipe.gradient)
    if (
        fuses_mlps
        and args.bias_swiglu_fusion
        and all(casts_swiglu(device, dtype) for dtype in dtypes)
    ):
        for chunk in chunks:
            _fuse_gated_mlps(chunk, recipe)
    return layers


def layers_in_fp8(args: argparse.Namespace) -> range:
    """Global indices of the layers that --first-last-layers-bf16 leaves to fp8."""
    if not args.first_last_layers_bf16:
        return range(args.num_layers)
    end = args.num_layers - args.num_layers_at_end_in_bf16
    return range(args.num_layers_at_start_in_bf16, end)


def require_sizes(args: argparse.Namespace, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
    """Raise UserError for sizes of named linear layers that GPUs do not take."""
    if problems := list(_problems(args, modules)):
        raise UserError(*problems)


def _fuse_gated_mlps(chunk: torch.nn.Module, recipe: Recipe) -> None:
    for module in chunk.modules():
        if not Fp8GatedMLP.takes(module, recipe):
            continue
        up, down = module.linear_fc1, module.linear_fc2
        if type(up) is Fp8ColumnParallelLinear and type(down) is Fp8RowParallelLinear:
            module.__class__ = Fp8GatedMLP
            up.__class__, down.__class__ = Fp8HeldColumnLinear, Fp8HeldRowLinear


def _linear_modules(
    args: argparse.Namespace, chunks: Sequence[torch.nn.Module], first_layers: Sequence[int]
) -> Iterator[tuple[str, torch.nn.Module]]:
    for chunk, first_layer in zip(chunks, first_layers, strict=True):
        for local, module in chunk.named_modules():
            is_grouped = isinstance(module, GroupedLinear)
            is_linear = type(module) in _CLASSES and not getattr(module, "is_expert", False)
            if not is_grouped and not is_linear:
                continue
            name = global_name(local, first_layer)
            layer = layer_of(name)
            is_chosen = layer is not None and layer in layers_in_fp8(args)
            if is_chosen or name.startswith(MTP):
                yield name, module


def _problems(
    args: argparse.Namespace, modules: Sequence[tuple[str, torch.nn.Module]]
) -> Iterator[str]:
    remedy = "or train in bf16 (in a plan file, of this mesh alone: fp8: none)"
    sizes: dict[tuple[int, ...], str] = {}
    for name, module in modules:
        sizes.setdefault(tuple(module.weight.shape[-2:]), name)  # type: ignore[index]
    for shape, name in sizes.items():
        if any(size % ALIGNMENT for size in shape):
            yield (
                f"--fp8-format: the weight of {name} is {shape[0]} x {shape[1]} on a rank, and fp8 "
                f"products need multiples of {ALIGNMENT}; change the sizes, {remedy}"
            )
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    if args.fp8_wgrad and modules and tokens % ALIGNMENT:
        yield (
            f"--fp8-format: a micro-batch has {counted(tokens, 'token')} on a rank, and fp8 "
            f"products need a multiple of {ALIGNMENT}; change --seq-length or --micro-batch-size, "
            f"add --no-fp8-wgrad, {remedy}"
        )


def _all_multiply_groups(
    device: torch.device, recipe: Recipe, group: dist.ProcessGroup | None
) -> bool:
    """Whether torch has the grouped product of experts for the devices of all ranks of a stage.

    Delayed maxima are those of the same layers on all of them.
    """
    own = multiplies_groups(device, recipe)
    if group is None:
        return own
    lacks = torch.tensor(float(not own), device=device)
    agree_on_maximum(lacks, group)
    return not lacks
