"""Matrices in 8-bit floating point (fp8): how they are cast, and their products by torch alone.

A matrix is divided by a factor, so that its largest element is the largest that the type has, and
cast; a product is multiplied by both factors again. An element that is not finite becomes NaN, and
so does what it is multiplied into, as in bf16.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from hetero.errors import HeteroError

DELAYED, TENSORWISE, ROWWISE = "delayed", "tensorwise", "rowwise"
HYBRID, E4M3 = "hybrid", "e4m3"
FNUZ_ARCHITECTURE = "gfx942"
"""Of MI300X and MI325X."""
ALIGNMENT = 16
"""Sizes of a product's matrices are multiples of this on GPUs; on CPU too, so that a simulated run
is refused what a real one would be."""
_LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal float32."""

INPUT, WEIGHT, GRADIENT = range(3)
"""The matrices of a layer, in the order of what is known of their maxima."""
PLAIN, SWIGLU, SWIGLU_GRADIENT = "plain", "swiglu", "swiglu gradient"
"""What is cast: matrices (..., rows, columns); silu(gate) * up of gate_up (rows, 2 * columns); or
of that the gradient (rows, 2 * columns), from its output's (rows, columns) and gate_up."""


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
    return scale_to(torch.finfo(dtype).max, amax, margin=margin)


def scale_to(largest: float | torch.Tensor, amax: torch.Tensor, *, margin: int) -> torch.Tensor:
    """`scale_of` for a type, or types, whose largest element is `largest`."""
    is_usable = torch.isfinite(amax) & (amax > 0)
    scale = amax.float().reciprocal() * largest / 2.0**margin
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


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in float32, of gate_up (rows, 2 * columns) (Shazeer, arXiv:2002.05202)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_gradient(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Of `swiglu`, (rows, 2 * columns), in float32, from its output's gradient (rows, columns)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    grad_gate = grad.float() * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, grad.float() * gate * sigmoid), dim=-1).to(gate_up.dtype)


_FORMED: dict[str, Callable[..., torch.Tensor]] = {
    PLAIN: lambda x: x,
    SWIGLU: swiglu,
    SWIGLU_GRADIENT: swiglu_gradient,
}


@dataclass(frozen=True)
class Operand:
    """A matrix in an 8-bit type, row-major, (rows, width), or one of each expert, (experts, rows,
    width)."""

    values: torch.Tensor
    inverse: torch.Tensor
    """What they are to be multiplied by, float32: () or (experts,), or for each row (..., rows, 1).
    """

    def scaled_by_rows(self) -> Operand:
        """The same, with an inverse for each row."""
        missing = (1,) * (self.values.dim() - self.inverse.dim())
        inverse = self.inverse.reshape(*self.inverse.shape, *missing)
        return Operand(self.values, inverse.expand(*self.values.shape[:-1], 1).contiguous())


def product(
    left: Operand, right: Operand, dtype: torch.dtype, *, fast: bool = False
) -> torch.Tensor:
    """left (m, k) times right (n, k) transposed: (m, n).

    `fast`: NVIDIA's tensor cores may sum with fewer bits.
    """
    if left.inverse.dim() == 2 and not left.values.is_cuda:
        # Before torch 2.13 a CPU takes one factor a matrix.
        one = torch.ones(())
        unscaled = product(Operand(left.values, one), Operand(right.values, one), torch.float32)
        return (unscaled * left.inverse * right.inverse.t()).to(dtype)
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


def grouped_product(
    left: Operand, right: Operand, ends: torch.Tensor, *, fast: bool = False
) -> torch.Tensor:
    """The rows of each expert in left (tokens, k), times its matrix in right (experts, n, k)
    transposed: (tokens, n), bf16.

    Both are scaled by rows; there are tokens. `ends` (experts,), int32: the row after the last one
    of each expert; it stays on the device. `fast` as in `product`.
    """
    if left.values.is_cuda:
        given: torch.Tensor = torch._scaled_grouped_mm(
            left.values,
            right.values.transpose(1, 2),
            left.inverse.squeeze(-1),
            right.inverse.squeeze(-1),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast and torch.version.hip is None,
        )
        return given
    # torch has none for CPUs.
    splits = ends[:-1].tolist()
    rows = zip(left.values.tensor_split(splits), left.inverse.tensor_split(splits), strict=True)
    experts = zip(right.values, right.inverse, strict=True)
    return torch.cat(
        [
            product(Operand(*own), Operand(*expert), torch.bfloat16)
            for own, expert in zip(rows, experts, strict=True)
        ]
    )


def scaled_by_rows(
    *inputs: torch.Tensor, dtype: torch.dtype, form: str = PLAIN, turns: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the inverse of an `Operand` of which each row is scaled by itself: of what
    `form` makes of the inputs or, with `turns`, of its transposed matrices."""
    x = _FORMED[form](*inputs)
    if turns:
        x = x.mT.contiguous()
    rows = x.flatten(0, -2)
    scale = scale_of(largest_magnitude(rows, 1), dtype)
    return cast(rows, scale, dtype).view(x.shape), (1.0 / scale).view(*x.shape[:-1], 1)


@cache
def _compiled_by_rows() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    # By size torch would compile it eight times at most, and compute the rest operation by
    # operation.
    return torch.compile(scaled_by_rows, dynamic=True)


def cast_by_rows(
    *inputs: torch.Tensor, dtype: torch.dtype, form: str = PLAIN, turns: bool = False
) -> Operand:
    """`scaled_by_rows` of contiguous inputs."""
    by_rows = _compiled_by_rows() if inputs[0].is_cuda else scaled_by_rows
    return Operand(*by_rows(*inputs, dtype=dtype, form=form, turns=turns))


def magnitude(*inputs: torch.Tensor, form: str = PLAIN) -> torch.Tensor:
    """The `largest_magnitude` of what `form` makes of the inputs: (), or (experts,) of matrices
    (experts, rows, columns)."""
    if inputs[0].is_cuda:
        from megatron.hetero.fp8_cast import largest_magnitude as in_one_pass

        return in_one_pass(*inputs, form=form)
    x = _FORMED[form](*inputs)
    return largest_magnitude(x) if x.dim() == 2 else largest_magnitude(x.flatten(1), 1).squeeze(1)


def transpose(values: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix of an 8-bit type, transposed and row-major."""
    if values.is_cuda:
        from megatron.hetero.fp8_cast import transpose as by_tiles

        return by_tiles(values)
    return values.t().contiguous()


def cast_both_ways(
    *inputs: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    form: str = PLAIN,
    transposed: bool,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`cast` of what `form` makes of the inputs and, if wanted, of its transposed matrices; raises
    `seen` () to its maximum.

    A plain input may be (experts, rows, columns), with a `scale` of () or (experts,).
    """
    if inputs[0].is_cuda:
        from megatron.hetero.fp8_cast import cast_both

        return cast_both(
            *inputs, scale=scale, dtype=dtype, form=form, transposed=transposed, seen=seen
        )
    x = _FORMED[form](*inputs)
    if seen is not None:
        seen.copy_(torch.maximum(seen, largest_magnitude(x)))
    values = cast(x, scale.view(-1, 1, 1) if scale.dim() else scale, dtype)
    return values, values.mT.contiguous() if transposed else None


@cache
def casts_swiglu(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU's kernel casts SwiGLU and its gradient as plain operations do: it compares,
    because compilers have been wrong here. On CPU they are plain operations."""
    if device.type != "cuda":
        return True
    generator = torch.Generator(device).manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.bfloat16, device=device)
    # A width at which a wrong kernel has been seen to be wrong; a narrow one it had passed.
    gate_up, grad = draw(128, 2 * 14336), draw(128, 14336)
    scale = torch.tensor(20.0, device=device)
    for form, inputs in ((SWIGLU, (gate_up,)), (SWIGLU_GRADIENT, (grad, gate_up))):
        values, turned = cast_both_ways(
            *inputs, scale=scale, dtype=dtype, form=form, transposed=True, seen=None
        )
        expected = cast(_FORMED[form](*inputs), scale, dtype).float()
        assert turned is not None
        # The exponential may differ in its last bit, which decides the rounding of a few.
        same = (values.float() == expected).float().mean()
        if same < 0.99 or not torch.equal(turned.float().t(), values.float()):
            return False
    return True


@cache
def adds_in_product(device: torch.device, left: torch.dtype, right: torch.dtype) -> bool:
    """Whether a product of these types can be added to float32 by the library that multiplies, on
    this device and in this build of torch: it tries, and looks at the sum."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    from megatron.hetero.cublas_lt import CublasLtError, add_product

    counting = torch.arange(32 * 32, device=device).remainder(5).view(32, 32).float()
    scale = torch.tensor(0.5, device=device)
    total = torch.ones_like(counting)
    try:
        add_product(
            total,
            left=counting.to(left),
            right=counting.to(right),
            left_inverse=scale,
            right_inverse=scale,
        )
    except CublasLtError:
        return False
    return torch.allclose(total, counting @ counting.t() * 0.25 + 1, rtol=1e-2)


def add_product(total: torch.Tensor, left: Operand, right: Operand) -> None:
    """total (m, n) += `product` of left (m, k) and right (n, k)."""
    dtypes = left.values.dtype, right.values.dtype
    is_by_tensor = total.dtype == torch.float32 and left.inverse.dim() == 0
    if not is_by_tensor or not adds_in_product(total.device, *dtypes):
        total.add_(product(left, right, total.dtype))
        return
    from megatron.hetero.cublas_lt import add_product as in_one_pass

    in_one_pass(
        total,
        left=left.values,
        right=right.values,
        left_inverse=left.inverse,
        right_inverse=right.inverse,
    )


def _casts_alike(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a device's own kernels cast x, and what is too large or not finite, as `cast`, and
    transpose it: in tiles that are whole and that are not."""
    x = x.repeat(5, 8)
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 3e38], device=x.device)
    scale = torch.tensor(0.37, device=x.device)
    expected = cast(x, scale, dtype).float().nan_to_num(7.0)
    values, turned = cast_both_ways(x, scale=scale, dtype=dtype, transposed=True, seen=None)
    assert turned is not None
    both = (values.float(), turned.float().t(), transpose(turned).float())
    return all(torch.equal(each.nan_to_num(7.0), expected) for each in both)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


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
            raise HeteroError(
                f"{_name_of(device)} with torch {torch.__version__} cannot multiply "
                f"{recipe.type_names()} ({recipe.scaling}): {reason}; fp8 needs "
                "NVIDIA's compute capability 8.9 or above, or AMD's gfx942 or gfx950; train in "
                "bf16 (in a plan file, of this mesh alone: fp8: none)"
            )


def multiplies_groups(device: torch.device, recipe: Recipe) -> bool:
    """Whether torch has the grouped product of experts for a device. Raises HeteroError if it is
    wrong."""
    counting = torch.arange(32 * 32, device=device).remainder(5).view(32, 32).to(torch.bfloat16)
    experts = torch.stack([counting, counting.flip(0), -counting])
    left, right = (
        Operand(cast(x, torch.ones((), device=device), recipe.forward), x.new_ones(()).float())
        for x in (counting, experts)
    )
    # One without tokens, and one that does not begin at a multiple of 16.
    ends = torch.tensor([7, 7, 32], dtype=torch.int32, device=device)
    try:
        found = grouped_product(left.scaled_by_rows(), right.scaled_by_rows(), ends)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False
    expected = torch.cat([counting[:7] @ counting.t(), counting[7:] @ -counting.t()])
    if not torch.allclose(found.float(), expected.float(), rtol=1e-2):
        raise HeteroError(
            f"{_name_of(device)} with torch {torch.__version__} computes wrong grouped "
            f"products of {recipe.type_names()}, which experts need; train in bf16 (in a plan "
            "file, of this mesh alone: fp8: none)"
        )
    return True
