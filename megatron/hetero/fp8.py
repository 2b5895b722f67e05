"""Products of linear layers in 8-bit floating point (fp8), by torch alone, on both vendors.

megatron-core leaves fp8 to TransformerEngine, and without it trains in bf16 whatever its
configuration says. Here forward, input gradient and weight gradient of a linear layer are products
of `torch._scaled_mm`. Each matrix is divided by a factor, so that its largest element is the
largest that the type has, and cast; the product is multiplied by both factors again. Weights,
activations and gradients stay in bf16 between products, so stages with different types can train
together: MI300X and MI325X (gfx942) have types of their own, whose names end in fnuz.

What is scaled at a time, and by which maximum (Micikevicius et al., arXiv:2209.05433):

- tensorwise: a tensor, by its own maximum;
- delayed: a tensor, by the largest maximum of the last steps, which saves a pass over it. These
  maxima are state of the training: buffers that are agreed over the ranks of a stage and saved;
- rowwise: each row of the left and each column of the right matrix, by its own maximum.

An element that is not finite becomes NaN, and so does what it is multiplied into, as in bf16. One
that a delayed scale does not reach becomes the largest of the type; such tensors are counted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from hetero.errors import HeteroError, UserError
from hetero.plan import Plan
from hetero.plan.plan import NO_FP8
from hetero.text import counted
from megatron.hetero.checkpoint.tensor_names import AMAX_HISTORY
from megatron.hetero.core_private import installed_weight_gradient
from megatron.hetero.latent_attention import ReplicatedLinear
from megatron.hetero.weights import MTP, global_name, layer_of

DELAYED, TENSORWISE, ROWWISE = "delayed", "tensorwise", "rowwise"
HYBRID, E4M3 = "hybrid", "e4m3"
FNUZ_ARCHITECTURE = "gfx942"
"""Of MI300X and MI325X."""
ALIGNMENT = 16
"""Sizes of a product's matrices are multiples of this on GPUs; on CPU too, so that a simulated run
is refused what a real one would be."""
_LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal float32."""

_PRODUCTS, _CLIPPED = "fp8_products", "fp8_clipped_tensors"
INPUT, WEIGHT, GRADIENT = range(3)
"""The matrices of a layer, in the order of what is known of their maxima."""
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input_gradient", "weight_gradient"
PRODUCTS = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Types:
    """The 8-bit types of a device."""

    e4m3: torch.dtype
    e5m2: torch.dtype

    @classmethod
    def of(cls, device: torch.device, vendor: str) -> Types:
        """A GPU has its own; a CPU has those of the GPUs of `vendor` that it stands in for."""
        if device.type != "cuda":
            is_fnuz = vendor == "amd"
        else:
            properties = torch.cuda.get_device_properties(device)
            is_fnuz = FNUZ_ARCHITECTURE in getattr(properties, "gcnArchName", "")
        if is_fnuz:
            return cls(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        return cls(torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Recipe:
    """How matrices are cast."""

    scaling: str
    """DELAYED, TENSORWISE or ROWWISE."""
    forward: torch.dtype
    """The type of inputs and weights."""
    gradient: torch.dtype
    """The type of output gradients."""
    weight_gradient: bool = True
    """Whether weight gradients are fp8 products too."""
    history: int = 1
    """Delayed: the steps whose maxima are kept."""
    takes_most_recent: bool = True
    """Delayed: whether the last step's maximum counts alone."""
    margin: int = 0
    """Delayed: powers of two between a maximum and the largest element of the type."""

    @classmethod
    def of(cls, args: argparse.Namespace, types: Types) -> Recipe | None:
        """What the flags ask for; None: no fp8."""
        if args.fp8_format is None:
            return None
        return cls(
            scaling=args.fp8_recipe,
            forward=types.e4m3,
            gradient=types.e4m3 if args.fp8_format == E4M3 else types.e5m2,
            weight_gradient=args.fp8_wgrad,
            history=args.fp8_amax_history_len,
            takes_most_recent=args.fp8_amax_compute_algo == "most_recent",
            margin=args.fp8_margin,
        )

    def dtype(self, role: int) -> torch.dtype:
        return self.gradient if role == GRADIENT else self.forward

    def type_names(self) -> str:
        """For messages."""
        used = dict.fromkeys((self.forward, self.gradient))
        return " and ".join(str(dtype).removeprefix("torch.float8_") for dtype in used)


def scale_of(amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0) -> torch.Tensor:
    """The factor, float32, that takes `amax` to the largest element of `dtype`.

    1 where there is no such factor: for zeros, and for what is not finite.
    """
    is_usable = torch.isfinite(amax) & (amax > 0)
    scale = torch.finfo(dtype).max / amax.float() / 2.0**margin
    return torch.where(is_usable, scale.clamp(max=_LARGEST_SCALE), 1.0)


def largest_magnitude(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The largest absolute value of x, or of each of its rows with `dim` 1; float32.

    Infinite where an element is not finite.
    """
    amax = x.abs().amax(dim=() if dim is None else dim, keepdim=dim is not None).float()
    return torch.nan_to_num(amax, nan=math.inf, posinf=math.inf)


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x times `scale` in an 8-bit type. What is too large becomes the largest element of the type,
    what is not finite NaN."""
    largest = torch.finfo(dtype).max
    scaled = (x.float() * scale).clamp(-largest, largest)
    return torch.where(x.isinf(), math.nan, scaled).to(dtype)


@dataclass(frozen=True)
class Operand:
    """A matrix in an 8-bit type, row-major, (rows, width)."""

    values: torch.Tensor
    inverse: torch.Tensor
    """What they are to be multiplied by, float32: () or, for each row, (rows, 1)."""


def product(
    left: Operand, right: Operand, dtype: torch.dtype, *, fast: bool = False
) -> torch.Tensor:
    """left (m, k) times right (n, k) transposed: (m, n).

    `fast`: NVIDIA's tensor cores may sum with fewer bits.
    """
    # Of matrices that are scaled by rows, GPUs give bf16 alone.
    is_rowwise = left.inverse.dim() == 2
    given: torch.Tensor = torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.inverse,
        scale_b=right.inverse.t() if is_rowwise else right.inverse,
        out_dtype=torch.bfloat16 if is_rowwise else dtype,
        use_fast_accum=fast and torch.version.hip is None,
    )
    return given.to(dtype)


def scaled_by_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the inverse of an `Operand` of which each row is scaled by itself."""
    scale = scale_of(largest_magnitude(x, 1), dtype)
    return cast(x, scale, dtype), 1.0 / scale


@cache
def _by_rows_on_gpus() -> Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(scaled_by_rows, dynamic=False)


class LayerScaling:
    """Casts and multiplies the matrices of one linear layer, and counts its products.

    Its weight is cast once, and kept until it is told that the weight has changed.
    """

    def __init__(self, name: str, recipe: Recipe) -> None:
        """`name` is the layer's in the whole model."""
        self.name, self.recipe = name, recipe
        self.products = dict.fromkeys(PRODUCTS, 0)
        self.delayed: tuple[_Histories, int] | None = None
        """Of delayed scaling, the maxima and the layer's number among them."""
        self._weight: tuple[Operand, Operand] | None = None

    def forget_weight(self) -> None:
        self._weight = None

    def lacks(self) -> str | None:
        """A kind of product that this layer has not computed in fp8, if there is any."""
        kinds = PRODUCTS if self.recipe.weight_gradient else PRODUCTS[:2]
        return next((kind for kind in kinds if not self.products[kind]), None)

    def operands(
        self,
        role: int,
        x: torch.Tensor,
        *,
        transposed: bool = True,
        records: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Operand, Operand | None]:
        """x (rows, width) and, if wanted, its transposed matrix in fp8.

        `records`: whether delayed scaling takes its maximum into account. `group`: ranks whose x
        are parts of one matrix, which has one factor; collective where no delayed scale is known.
        """
        dtype = self.recipe.dtype(role)
        x = x.contiguous()
        if self.recipe.scaling == ROWWISE:
            by_rows = _by_rows_on_gpus() if x.is_cuda else scaled_by_rows
            own = Operand(*by_rows(x, dtype))
            return own, Operand(*by_rows(x.t().contiguous(), dtype)) if transposed else None
        histories, layer = self.delayed or (None, 0)
        seen = histories.seen[layer, role] if histories is not None and records else None
        if histories is not None and histories.is_known:
            scale, inverse = histories.scales[layer, role], histories.inverses[layer, role]
        else:
            amax = _magnitude(x)
            if group is not None:
                _agree_on_maximum(amax, group)
            scale = scale_of(amax, dtype)
            inverse = 1.0 / scale
            if seen is not None:
                seen.copy_(torch.maximum(seen, amax))
                seen = None
        values, turned = _cast_both(x, scale, dtype, transposed=transposed, seen=seen)
        return Operand(values, inverse), None if turned is None else Operand(turned, inverse)

    def weight(self, weight: torch.Tensor) -> tuple[Operand, Operand]:
        """The layer's weight (n, k), and transposed."""
        if self._weight is None:
            own, transposed = self.operands(WEIGHT, weight.detach())
            assert transposed is not None
            self._weight = own, transposed
        return self._weight

    def multiply(
        self, kind: str, left: Operand, right: Operand, dtype: torch.dtype
    ) -> torch.Tensor:
        """`product`, counted."""
        self.products[kind] += 1
        return product(left, right, dtype, fast=kind == FORWARD)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        from megatron.hetero.fp8_cast import largest_magnitude as in_one_pass

        return in_one_pass(x)
    return largest_magnitude(x)


def _agree_on_maximum(amax: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace maxima by the largest of all ranks of a group. Collective."""
    if group.size() == 1:
        return
    shared = amax.cpu() if dist.get_backend(group) == "gloo" else amax
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    amax.copy_(shared)


def _transposed(values: torch.Tensor) -> torch.Tensor:
    """A matrix of an 8-bit type, transposed and row-major."""
    if values.is_cuda:
        from megatron.hetero.fp8_cast import transposed

        return transposed(values)
    return values.t().contiguous()


def _cast_both(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`cast` of x and, if wanted, of x transposed; raises `seen` () to the maximum of x."""
    if x.is_cuda:
        from megatron.hetero.fp8_cast import cast_both

        return cast_both(x, scale, dtype, transposed=transposed, seen=seen)
    if seen is not None:
        seen.copy_(torch.maximum(seen, largest_magnitude(x)))
    values = cast(x, scale, dtype)
    return values, _transposed(values) if transposed else None


@dataclass(frozen=True)
class _Call:
    """What megatron-core says to a linear layer besides the matrices."""

    scaling: LayerScaling
    adds_to_buffer: bool
    reduces_input_gradient: bool
    gathers_sequence: bool
    group: dist.ProcessGroup | None
    records: bool
    has_backward: bool

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
    """Adds it to the weight's buffer, or returns it; what megatron-core's hook wants is returned
    in any case."""
    call, weight = ctx.call, ctx.weight
    scaling, saved = call.scaling, ctx.saved_tensors
    adds = call.adds_to_buffer and hasattr(weight, "main_grad")
    if transposed_grad is None:
        total = saved[0] if gathered is None else gathered[0]
        rows = total.reshape(-1, total.shape[-1])
        if not adds:
            return grad_rows.t().matmul(rows)
        installed_weight_gradient().wgrad_gemm_accum_fp32(rows, grad_rows, weight.main_grad)
    else:
        if gathered is None:
            transposed = Operand(*saved)
        elif call.gathers_cast:
            transposed = Operand(_transposed(gathered[0]), saved[1])
        else:
            _, turned = scaling.operands(INPUT, gathered[0], records=False)
            assert turned is not None
            transposed = turned
        compute = partial(scaling.multiply, WEIGHT_GRADIENT, transposed_grad, transposed)
        if not adds:
            return compute(weight.dtype)
        installed_weight_gradient().add_product(compute, weight.main_grad)
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


_CLASSES = {
    ColumnParallelLinear: Fp8ColumnParallelLinear,
    RowParallelLinear: Fp8RowParallelLinear,
    ReplicatedLinear: Fp8ReplicatedLinear,
}


class _Histories:
    """The maxima of the last steps of all layers of a rank, and the scales that follow.

    Tensors have a row for each layer, and in their last dimension one for each of its matrices.
    Until a step has been completed, and after a checkpoint without maxima has been loaded, tensors
    are scaled by their own maxima.
    """

    def __init__(self, layers: Sequence[LayerScaling], recipe: Recipe, device: Any) -> None:
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self._recipe = recipe
        self.maxima = zeros(len(layers), recipe.history, 3)
        """The last step's come last."""
        self.seen, self.clipped = zeros(len(layers), 3), zeros(())
        """Of this step so far: the maxima, and how many tensors a scale has not reached."""
        self.is_known = False
        self._derive()
        for number, layer in enumerate(layers):
            layer.delayed = self, number

    @torch.no_grad()
    def end_step(self, group: dist.ProcessGroup) -> None:
        """Agree on the maxima of a step over the ranks of a stage, and scale by them from now on.

        Collective over `group`. A tensor that was all zeros, or not finite, keeps its last maximum.
        """
        seen = self.seen
        _agree_on_maximum(seen, group)
        last = self.maxima[:, -1]
        if self.is_known:
            reach = self._amax() * 2.0**self._recipe.margin
            self.clipped += (torch.isfinite(seen) & (seen > reach) & (reach > 0)).sum()
        learned = torch.where(torch.isfinite(seen) & (seen > 0), seen, last)
        self.maxima.copy_(torch.cat([self.maxima[:, 1:], learned.unsqueeze(1)], dim=1))
        seen.zero_()
        self.is_known = True
        self._derive()

    @torch.no_grad()
    def restart(self) -> None:
        """Take up the maxima that have been loaded, and forget what has been seen since."""
        self.seen.zero_()
        self.clipped.zero_()
        self.is_known = bool(self.maxima.any())
        self._derive()

    def _amax(self) -> torch.Tensor:
        if self._recipe.takes_most_recent:
            return self.maxima[:, -1]
        return self.maxima.amax(dim=1)

    def _derive(self) -> None:
        scales = [
            scale_of(amax, self._recipe.dtype(role), margin=self._recipe.margin)
            for role, amax in enumerate(self._amax().unbind(dim=1))
        ]
        # Not in place: an operand keeps the inverse of its scale.
        self.scales = torch.stack(scales, dim=1)
        self.inverses = 1.0 / self.scales


class CountedLayer(Protocol):
    """A linear layer that tells what it has computed in fp8."""

    name: str
    products: dict[str, int]

    def forget_weight(self) -> None: ...

    def lacks(self) -> str | None: ...


class Fp8Layers:
    """The linear layers of a rank whose products are fp8; none where the flags ask for none."""

    def __init__(
        self,
        modules: Sequence[tuple[str, torch.nn.Module]] = (),
        recipe: Recipe | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Switches the modules, named as in the whole model, to fp8.

        `group`: the ranks of the stage, which agree on delayed scales.
        """
        self.recipe, self._group = recipe, group
        self._layers: list[CountedLayer] = []
        self._histories: _Histories | None = None
        self._told = 0
        self._what = ""
        if recipe is None:
            return
        layers = []
        for name, module in modules:
            module.__class__ = _CLASSES[type(module)]  # type: ignore[assignment]
            layer = LayerScaling(name, recipe)
            module.fp8 = layer  # type: ignore[assignment]
            layers.append(layer)
        self._layers += layers
        if recipe.scaling == DELAYED and layers:
            self._histories = _Histories(layers, recipe, device)
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
        layers = f"{self.recipe.type_names()} in {counted(len(self), 'linear layer')}"
        return f"{layers} {self._what}".rstrip()


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
) -> Fp8Layers:
    """Switch the linear layers of a rank's chunks to fp8, where the flags ask for it.

    Attention and MLP of every layer, shared experts and MTP layers. The output layer, routers and
    experts' grouped products stay as they are, and so do the first and last layers that
    --first-last-layers-bf16 names. Call it once the chunks are on `device` and in bf16. Raises
    UserError for sizes that GPUs do not take, HeteroError if the device cannot multiply fp8.
    """
    recipe = Recipe.of(args, Types.of(device, vendor))
    if recipe is None:
        return Fp8Layers()
    modules = list(_linear_modules(args, chunks, first_layers))
    require_sizes(args, modules)
    if modules:
        require_device(device, recipe)
    return Fp8Layers(modules, recipe, group=group, device=device)


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


def _linear_modules(
    args: argparse.Namespace, chunks: Sequence[torch.nn.Module], first_layers: Sequence[int]
) -> Iterator[tuple[str, torch.nn.Module]]:
    for chunk, first_layer in zip(chunks, first_layers, strict=True):
        for local, module in chunk.named_modules():
            if type(module) not in _CLASSES or getattr(module, "is_expert", False):
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
        sizes.setdefault(tuple(module.weight.shape), name)  # type: ignore[arg-type]
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


def _casts_alike(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a device's own kernel casts x, and what is too large or not finite, as `cast`."""
    x = x.clone()
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 3e38], device=x.device)
    scale = torch.tensor(0.37, device=x.device)
    expected = cast(x, scale, dtype).float().nan_to_num(7.0)
    values, turned = _cast_both(x, scale, dtype, transposed=True, seen=None)
    assert turned is not None
    both = (values.float(), turned.float().t(), _transposed(turned).float())
    return all(torch.equal(each.nan_to_num(7.0), expected) for each in both)


def require_device(device: torch.device, recipe: Recipe) -> None:
    """Raise HeteroError if a device, or its build of torch, does not multiply by this recipe."""
    counting = torch.arange(32 * 32, device=device).remainder(5).view(32, 32).to(torch.bfloat16)
    for left_dtype in dict.fromkeys((recipe.forward, recipe.gradient)):
        scale = torch.ones((32, 1) if recipe.scaling == ROWWISE else (), device=device)
        left = Operand(cast(counting, scale, left_dtype), scale)
        right = Operand(cast(counting, scale, recipe.forward), scale)
        try:
            found = product(left, right, torch.bfloat16)
            is_right = torch.allclose(
                found.float(), counting.float() @ counting.float().t(), rtol=1e-2
            )
            reason = "its products are wrong"
            if is_right and recipe.scaling != ROWWISE and not _casts_alike(counting, left_dtype):
                is_right, reason = False, "its kernel casts otherwise than torch"
        except (RuntimeError, NotImplementedError, ValueError) as error:
            is_right, reason = False, str(error).splitlines()[0]
        if not is_right:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
            raise HeteroError(
                f"{name} with torch {torch.__version__} cannot multiply {recipe.type_names()} "
                f"({recipe.scaling}): {reason}; fp8 needs NVIDIA's compute capability 8.9 or "
                "above, or AMD's gfx942 or gfx950; train in bf16 (in a plan file, of this mesh "
                "alone: fp8: none)"
            )
