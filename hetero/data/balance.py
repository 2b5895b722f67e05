"""Sets a sampler's shares by the measured speed of the ranks."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetero.data.layer_times import (
    HostClock,
    clock_of,
    in_backward,
    layers_of,
    mark_inputs,
    mark_outputs,
)
from hetero.data.sampler import ShareBatchSampler
from hetero.data.shares import Shares, balanced
from hetero.errors import UserError
from hetero.startup.identity import own_vendor
from hetero.text import counted

_MAX_CONSECUTIVE = 3
"""Measurements in a row, each after a change of the shares."""


class Balance:
    """Measures each rank's seconds per sample, and sets the sampler's shares accordingly.

    Times the forward and backward passes of the layers of `models` (the model as it is called, and
    a loss that is a module), without communication. After `warm_up` steps, `steps` steps
    are measured; all ranks then tell each other their medians, compute the same shares, and change
    to them with the same batch where that shortens a step by at least `tolerance`.

    After a change they measure again, until nothing changes or they have measured three times: a
    GPU that has waited for others may clock higher than one that computes all the time. With
    `every`, the last `steps` of each `every` steps are measured from then on.

    Collective over `group`, whose ranks are those of the sampler's shares. On one with GPUs a
    measurement waits for the GPU once, at its end. Raises UserError with all that is wrong.
    """

    def __init__(
        self,
        sampler: ShareBatchSampler,
        *models: nn.Module,
        every: int | None = None,
        warm_up: int = 3,
        steps: int = 5,
        tolerance: float = 0.01,
        group: dist.ProcessGroup | None = None,
        clock: HostClock | None = None,
    ) -> None:
        ranks = dist.get_world_size(group)
        wrong = []
        if steps < 1 or warm_up < 0:
            wrong.append(f"steps {steps} and warm_up {warm_up}: use at least 1 and at least 0")
        if every is not None and every < steps:
            wrong.append(f"every {every} is less than the {steps} steps of a measurement; raise it")
        if not 0 <= tolerance < 1:
            wrong.append(f"tolerance {tolerance}: use a number from 0 to below 1, such as 0.01")
        if len(sampler.shares.counts) != ranks:
            wrong.append(
                "the sampler shares batches out among "
                f"{counted(len(sampler.shares.counts), 'rank')} and the group has {ranks}; use the "
                "group of all that share the batch"
            )
        layers = layers_of(*models)
        if not layers:
            wrong.append("there is no model; pass the one that is called")
        if any(part._compiled_call_impl for model in models for part in model.modules()):
            wrong.append(
                "a layer was compiled by its method compile(), which compiles its hooks too; put "
                "torch.compile(layer) in its place"
            )
        if wrong:
            raise UserError(f"the ranks cannot be measured: {'; '.join(wrong)}")
        self._sampler, self._group = sampler, group
        self._every, self._tolerance = every, tolerance
        self._warm_up, self._steps = warm_up, steps
        self._settling = _MAX_CONSECUTIVE
        """Measurements left in this row."""
        self._clock = clock or clock_of(layers)
        self._until = warm_up + steps
        """Steps until the next measurement ends."""
        self._began: dict[tuple[int, str], Any] = {}
        self._spans: list[tuple[Any, Any]] = []
        self._measured: list[tuple[int, list[tuple[Any, Any]]]] = []
        self.seconds_per_sample: tuple[float, ...] = ()
        """The result of the last measurement, by rank."""
        self._handles = [
            handle for number, layer in enumerate(layers) for handle in self._watch(number, layer)
        ]

    def step(self, samples: int) -> Shares | None:
        """End a step in which this rank has computed `samples`; return the shares if they change.

        Every rank calls it after every backward pass, or after the last of several micro-batches.
        """
        if not self._handles:
            return None
        if self._is_measuring:
            self._measured.append((samples, self._spans))
        self._spans = []
        self._began.clear()
        self._until -= 1
        if self._until:
            return None
        changed = self._conclude()
        self._settling -= 1
        if changed is not None and self._settling > 0:
            self._until = self._warm_up + self._steps
        elif self._every is not None:
            self._until, self._settling = self._every, _MAX_CONSECUTIVE
        else:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        return changed

    @property
    def is_over(self) -> bool:
        """Whether all measurements are done."""
        return not self._handles

    @property
    def _is_measuring(self) -> bool:
        return self._until <= self._steps

    def _conclude(self) -> Shares | None:
        costs = [
            sum(self._clock.seconds(*span) for span in spans) / samples
            for samples, spans in self._measured
            if samples > 0
        ]
        self._measured = []
        measured: list[Any] = [None] * dist.get_world_size(self._group)
        own = (statistics.median(costs) if costs else 0.0, self._sampler.position)
        dist.all_gather_object(measured, own, group=self._group)
        if silent := [rank for rank, (cost, _) in enumerate(measured) if not cost > 0]:
            raise UserError(
                f"nothing was measured on ranks {silent}: none of the layers was called, or no "
                "samples were; pass the model that is called, and step() what it has computed"
            )
        self.seconds_per_sample = tuple(cost for cost, _ in measured)
        shares = self._sampler.newest_shares
        better = balanced(shares, self.seconds_per_sample, tolerance=self._tolerance)
        if better == shares:
            return None
        # A rank's loader may have drawn further ahead than another's.
        self._sampler.set_shares(better, start=max(position for _, position in measured))
        return better

    def _watch(self, number: int, layer: nn.Module) -> list[Any]:
        """Hooks that run inside FSDP2's in both directions, whichever were registered first."""
        forward, backward = (number, "forward"), (number, "backward")
        start, end = partial(self._start, backward), partial(self._end, backward)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._is_measuring or not torch.is_grad_enabled():
                return None  # never measure an evaluation between steps
            marked = mark_inputs((args, kwargs), end)
            # Recomputation by activation checkpointing is part of the backward pass.
            if not in_backward():
                self._start(forward)
            return marked

        def after(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if self._is_measuring and torch.is_grad_enabled():
                if not in_backward():
                    self._end(forward)
                mark_outputs(layer, (args, kwargs), outputs, start=start, end=end)

        return [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, with_kwargs=True, prepend=True),
        ]

    def _start(self, what: tuple[int, str]) -> None:
        self._began[what] = self._clock.mark()

    def _end(self, what: tuple[int, str]) -> None:
        began = self._began.pop(what, None)
        if began is not None:
            self._spans.append((began, self._clock.mark()))


def vendor_of_each_rank(group: dist.ProcessGroup | None = None) -> list[str]:
    """The vendors of all ranks of a group, as HETERO_VENDOR has them. Collective over it."""
    vendors: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(vendors, own_vendor(), group=group)
    return vendors
