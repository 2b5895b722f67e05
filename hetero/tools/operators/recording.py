"""One side of a comparison: build the model, run its operators, and keep what they computed.

Operators run one by one, from drawn inputs, or all as they follow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from hetero.errors import UserError
from hetero.observe.operators import operator_list
from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.sample import Sample, take
from hetero.observe.operators.tape import Tape, Tensors
from hetero.plan import Plan
from hetero.plan.plan import VENDOR_VARIABLE, VENDORS
from hetero.startup.identity import running_vendor
from hetero.tools.operators.draws import Draws, fill_weights, input_std
from hetero.tools.operators.dump import ACCUMULATED, ISOLATED, REFERENCE, Dump, Header
from hetero.tools.operators.layer_flags import compared_flags, kernel_flags
from hetero.tools.operators.reference import Reference, rotary_angles
from megatron.hetero import fp8, weights
from megatron.hetero.core_private import single_process_groups
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.fp8_operands import Recipe, Types
from megatron.hetero.kernels import Kernels, install_kernels, select_kernels
from megatron.hetero.model import build_chunk, torch_dtype, transformer_config
from megatron.hetero.operator_hooks import operator_hooks


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


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def record(args: argparse.Namespace, *, device: str, sample: int) -> Dump:
    """Run every operator on `device`, `cuda`, `cpu` or `reference`, and keep `sample` elements.

    `args` come from `layer_arguments`. Raises UserError for a device that is not there.
    """
    if device not in (REFERENCE, default_device()):
        raise UserError(
            f"--device {device}: this process runs on {default_device()}; "
            + (
                "use a PyTorch that sees a GPU"
                if device == "cuda"
                else "hide the GPUs with CUDA_VISIBLE_DEVICES= (HIP_VISIBLE_DEVICES= for AMD's)"
            )
        )
    place = torch.device(default_device())
    with built_model(args, place) as (model, kernels):
        alone = dist.group.WORLD
        assert alone is not None
        fp8.install(
            args,
            [model],
            [0],
            vendor=_played_vendor(),
            group=alone,
            device=place,
            fuses_mlps=False,
        )
        if kernels.weight_gradient and device != REFERENCE:
            _add_gradient_buffers(model)
        return _Side(args, model, kernels, device=device, sample=sample).record()


@contextmanager
def built_model(
    args: argparse.Namespace, place: torch.device
) -> Iterator[tuple[GPTModel, Kernels]]:
    """The model as training builds it, alone in this process, its weights not drawn yet.

    Its linear layers are not switched to fp8 yet either.
    """
    with cpu_shim(), _groups(args.num_layers, place) as (plan, collection):
        config = transformer_config(args, plan, place)
        kernels = install_kernels(
            select_kernels(args, place), config, device=place, grad_dtype=torch.float32
        )
        model = build_chunk(
            args,
            config,
            plan=plan,
            coordinate=plan.coordinate(0),
            chunk=0,
            groups=collection,
            kernels=kernels,
        )
        # Not every parameter is built in the run's dtype; training casts them by Float16Module.
        model.to(place, torch_dtype(args.params_dtype))
        model.train()
        yield model, kernels


def _played_vendor() -> str:
    """Whose types of fp8 a CPU computes with."""
    named = os.environ.get(VENDOR_VARIABLE)
    return named if named in VENDORS else running_vendor()


def _fp8_types(args: argparse.Namespace, place: torch.device) -> str:
    recipe = Recipe.of(args, Types.of(place, _played_vendor()))
    return "" if recipe is None else recipe.type_names()


def _add_gradient_buffers(model: GPTModel) -> None:
    """What DistributedDataParallel would give the weights, for kernels that add into it."""
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        clear_gradient(parameter)


def _groups(layers: int, device: torch.device) -> AbstractContextManager[tuple[Plan, Any]]:
    """Groups of the vendor's library, as in training."""
    if device.type != "cuda":
        return single_process_groups(layers)
    torch.cuda.set_device(0)
    return single_process_groups(
        layers, vendor=running_vendor(), vendor_backend="nccl", default="cpu:gloo,cuda:nccl"
    )


class _Side:
    """A model with its weights and tokens, run once as real modules or as the reference."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: GPTModel,
        kernels: Kernels,
        *,
        device: str,
        sample: int,
    ) -> None:
        self._args = args
        self._kernels = kernels
        self._model = model
        self._device = device
        self._dtype = torch_dtype(args.params_dtype)
        self._draws = Draws(seed=args.seed, dtype=self._dtype)
        named = list(weights.named_parameters([model], [0]))
        fill_weights(args, self._draws, named)
        self._parameters = dict(named)
        shape = (args.micro_batch_size, args.seq_length)
        vocabulary = args.padded_vocab_size
        self._tokens = self._draws.tokens("tokens", shape, vocabulary=vocabulary)
        self._labels = self._draws.tokens("labels", shape, vocabulary=vocabulary)
        rows, counts = self._tokens.unique(return_counts=True)
        self._operators = operator_list.operators(
            args, layers=args.num_layers, repeats=int(counts.max())
        )
        self._recording = Recording({op.name: op for op in self._operators}, rows, sample)

    def record(self) -> Dump:
        reference = self._reference() if self._device == REFERENCE else None
        self._run(self._isolated_tape(), reference)
        for parameter in self._parameters.values():
            clear_gradient(parameter)
        accumulated = AccumulatedTape(self._recording)
        loss = self._run(accumulated, reference)
        loss.backward(torch.ones_like(loss))
        accumulated.finish()
        return Dump(self._header(), self._recording.samples)

    def _reference(self) -> Reference:
        """The formulas with the model's weights, and for the tape their gradients."""
        self._parameters = {
            name: torch.nn.Parameter(parameter.detach().cpu().double())
            for name, parameter in self._parameters.items()
        }
        return Reference(self._args, self._parameters)

    def _isolated_tape(self) -> IsolatedTape:
        angles = None
        if self._args.position_embedding_type == "rope":
            angles = self._draws.given("rotary angles", rotary_angles(self._args).float())
        real = self._device != REFERENCE
        return IsolatedTape(
            self._recording,
            self._draws,
            epsilon=self._args.layernorm_epsilon,
            angles=angles,
            compute=self._dtype if real else torch.float64,
            device=torch.device(default_device() if real else "cpu"),
        )

    def _run(self, tape: Tape, reference: Reference | None) -> torch.Tensor:
        if reference is not None:
            return reference.run(tape, tokens=self._tokens, labels=self._labels)
        device = next(self._model.parameters()).device
        tokens, labels = self._tokens.to(device), self._labels.to(device)
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        with operator_hooks(self._model, tape):
            loss: torch.Tensor = self._model(tokens, positions, None, labels=labels)
            tape.outputs(operator_list.LOSS, {"loss": loss})
        return loss

    def _header(self) -> Header:
        vendor = REFERENCE if self._device == REFERENCE else running_vendor()
        name = torch.cuda.get_device_name() if self._device == "cuda" else "CPU"
        return Header(
            vendor=vendor,
            device=name,
            torch=torch.__version__,
            runtime=_runtime() if self._device == "cuda" else "",
            dtype=self._args.params_dtype,
            seed=self._args.seed,
            sample=self._recording.sample,
            flags=compared_flags(self._args),
            kernels={
                **kernel_flags(self._args),
                "fused": self._kernels.names(),
                "fp8": _fp8_types(self._args, torch.device(default_device())),
            },
            inputs=dict(sorted(self._draws.digests.items())),
            operators=self._ordered(),
        )

    def _ordered(self) -> tuple[Operator, ...]:
        """The operators, each of which the model must have computed."""
        computed = {name.split("/")[1] for name in self._recording.samples}
        for operator in self._operators:
            if operator.name not in computed:
                raise RuntimeError(f"the model has not computed {operator.name}")
        return self._operators


def _runtime() -> str:
    return f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
