"""One side of a comparison: build the model, run its operators, and keep what they computed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from hetero.errors import UserError
from hetero.observe.operators import operator_list
from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.tape import Tape
from hetero.plan import Plan
from hetero.startup.identity import running_vendor
from hetero.tools.operators.draws import Draws, fill_weights
from hetero.tools.operators.dump import REFERENCE, Dump, Header
from hetero.tools.operators.layer_flags import compared_flags, kernel_flags
from hetero.tools.operators.reference import Reference, rotary_angles
from hetero.tools.operators.tape import (
    AccumulatedTape,
    IsolatedTape,
    Recording,
    clear_gradient,
)
from megatron.hetero import weights
from megatron.hetero.core_private import single_process_groups
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.kernels import Kernels, install_kernels, select_kernels
from megatron.hetero.model import build_chunk, torch_dtype, transformer_config
from megatron.hetero.operator_hooks import operator_hooks


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def record(args: argparse.Namespace, *, device: str, sample: int) -> Dump:
    """Run every operator on `device`, `cuda`, `cpu` or `reference`, and keep `sample` elements.

    `args` come from `flags.layer_arguments`. Raises UserError for a device that is not there.
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
        if kernels.weight_gradient and device != REFERENCE:
            _add_gradient_buffers(model)
        return _Side(args, model, kernels, device=device, sample=sample).record()


@contextmanager
def built_model(
    args: argparse.Namespace, place: torch.device
) -> Iterator[tuple[GPTModel, Kernels]]:
    """The model as training builds it, alone in this process, its weights not drawn yet."""
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
            kernels={**kernel_flags(self._args), "fused": self._kernels.names()},
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
