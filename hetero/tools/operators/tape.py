"""What is recorded of a running model: its operators one by one, or all as they follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.sample import Sample, take
from hetero.observe.operators.tape import Tensors
from hetero.tools.operators.draws import Draws, input_std
from hetero.tools.operators.dump import ACCUMULATED, ISOLATED


@dataclass(frozen=True)
class Recording:
    """How both tapes keep tensors."""

    operators: Mapping[str, Operator]
    rows: torch.Tensor
    """The rows of an embedding that the tokens touch, on the CPU; the others get no gradient."""
    sample: int
    samples: dict[str, Sample] = field(default_factory=dict)

    def keep(self, mode: str, operator: str, tensor: str, value: torch.Tensor) -> None:
        if tensor.startswith("grad") and tensor.endswith("embeddings.weight"):
            rows = self.rows if "word" in tensor else torch.arange(len(value))
            value = value[rows.to(value.device)]
        self.samples[f"{mode}/{operator}/{tensor}"] = take(value, count=self.sample)


class IsolatedTape:
    """Gives every operator drawn inputs and drawn gradients, and so cuts the model apart."""

    def __init__(
        self,
        recording: Recording,
        draws: Draws,
        *,
        epsilon: float,
        angles: torch.Tensor | None,
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self._recording = recording
        self._draws = draws
        self._epsilon = epsilon
        self._angles = angles
        self._compute = compute
        self._device = device
        self._leaves: dict[str, dict[str, torch.Tensor]] = {}

    def inputs(self, operator: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        kind = self._recording.operators[operator].kind
        leaves = {}
        for name, arrived in tensors.items():
            std = input_std(kind, name, epsilon=self._epsilon)
            drawn = self._draws.normal(f"{operator} {name}", arrived.shape, std=std)
            leaf = _laid_out_like(arrived, dtype=self._compute, device=self._device)
            leaves[name] = leaf.copy_(drawn).requires_grad_()
        self._leaves.setdefault(operator, {}).update(leaves)
        return leaves

    def angles(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._angles is None:
            return tensor
        return self._angles.to(tensor)

    def outputs(self, operator: str, outputs: Tensors, parameters: Tensors | None = None) -> None:
        for name, value in outputs.items():
            self._recording.keep(ISOLATED, operator, name, value)
        wanted = {**self._leaves.pop(operator, {}), **(parameters or {})}
        if not wanted:
            return
        upstream = [
            self._draws.normal(f"{operator} grad {name}", value.shape).to(value)
            for name, value in outputs.items()
        ]
        for value in wanted.values():
            clear_gradient(value)
        found = torch.autograd.grad(
            list(outputs.values()), list(wanted.values()), upstream, allow_unused=True
        )
        for (name, value), grad in zip(wanted.items(), found, strict=True):
            self._recording.keep(ISOLATED, operator, f"grad {name}", whole_gradient(value, grad))


def _laid_out_like(
    tensor: torch.Tensor, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory for a leaf; kernels are chosen by strides too, so it keeps those of `tensor`."""
    if 0 in tensor.stride():
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)


def clear_gradient(tensor: torch.Tensor) -> None:
    """Empty the buffer into which fused kernels add a weight's gradient, where there is one."""
    if hasattr(tensor, "main_grad"):
        tensor.main_grad.zero_()
        tensor.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def whole_gradient(tensor: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """What reached the buffer and what autograd found, put together as megatron-core's DDP does."""
    if grad is None:
        grad = torch.zeros_like(tensor)
    if not getattr(tensor, "grad_added_to_main_grad", False):
        return grad
    buffer: torch.Tensor = tensor.main_grad  # type: ignore[attr-defined]
    # Where all of it is in the buffer, autograd was handed memory that nobody has written.
    return buffer + grad if getattr(tensor, "zero_out_wgrad", False) else buffer


class AccumulatedTape:
    """Lets the model run as it is. After its backward pass, `finish` records the weights' part."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._parameters: list[tuple[str, str, torch.Tensor]] = []

    def inputs(self, operator: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return tensors

    def angles(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def outputs(self, operator: str, outputs: Tensors, parameters: Tensors | None = None) -> None:
        for name, value in outputs.items():
            self._recording.keep(ACCUMULATED, operator, name, value)
            if value.requires_grad:
                value.register_hook(self._keep_gradient(operator, name))
        self._parameters += [(operator, *item) for item in (parameters or {}).items()]

    def finish(self) -> None:
        for operator, name, parameter in self._parameters:
            grad = whole_gradient(parameter, parameter.grad)
            self._recording.keep(ACCUMULATED, operator, f"grad {name}", grad)

    def _keep_gradient(self, operator: str, name: str) -> Callable[[torch.Tensor], None]:
        def keep(grad: torch.Tensor) -> None:
            self._recording.keep(ACCUMULATED, operator, f"grad {name}", grad)

        return keep
