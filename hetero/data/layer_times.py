"""Finds a model's layers, and the points where their forward and backward passes start and end.

Those exclude a layer's communication: FSDP2 gathers its parameters before, and reduces its
gradients after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def layers_of(*models: nn.Module) -> list[nn.Module]:
    """The modules that together hold all parameters: blocks, embeddings, an output layer.

    Descends into Sequential, and into any module that contains a ModuleList. A model without
    children (a loss, a linear layer) is a layer itself, and so is what torch.compile returns: it
    calls no hooks of modules within.
    """
    found: list[nn.Module] = []
    for model in models:
        children = () if _is_compiled(model) else model.children()
        found += [part for child in children for part in _parts(child)] or [model]
    return found


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod")


def _parts(module: nn.Module) -> Iterable[nn.Module]:
    is_container = isinstance(module, nn.Sequential) or any(
        isinstance(inner, nn.ModuleList) for inner in module.modules()
    )
    if is_container and not _is_compiled(module):
        for child in module.children():
            yield from _parts(child)
    elif next(module.parameters(), None) is not None:
        yield module


def mark_inputs(arguments: Any, end: Callable[[], None]) -> Any:
    """The arguments of a layer, with `end` called once the layer has computed their gradients.

    They are views: what else uses an argument has a part in its gradient, but not in a view's. A
    layer may write to a view, as to the argument; then `end` is not called.
    """
    leaves, tree = tree_flatten(arguments)
    if not torch.is_grad_enabled() or not any(map(_has_gradient, leaves)):
        return arguments
    leaves = [leaf.view_as(leaf) if _has_gradient(leaf) else leaf for leaf in leaves]
    views = [leaf for leaf in leaves if _has_gradient(leaf)]
    torch.autograd.graph.register_multi_grad_hook(views, lambda _: end())
    return tree_unflatten(leaves, tree)


def mark_outputs(
    layer: nn.Module,
    arguments: Any,
    outputs: Any,
    *,
    start: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """Have `start` called before the backward pass of a layer.

    It is called after all hooks of the outputs, in which FSDP2 waits for parameters. If no argument
    requires a gradient, such as token ids, `end` is called once the parameters have theirs.
    """
    for node in {leaf.grad_fn for leaf in tree_flatten(outputs)[0] if _has_gradient(leaf)}:
        if node is not None:
            node.register_prehook(lambda _: start())
    if any(map(_has_gradient, tree_flatten(arguments)[0])) or in_backward():
        return
    # Look them up on every pass: FSDP2 replaces its shards by unsharded parameters during it.
    parameters = [p for p in layer.parameters() if p.requires_grad]
    if parameters and torch.is_grad_enabled():

        def once(_: Any) -> None:
            handle.remove()
            end()

        handle = torch.autograd.graph.register_multi_grad_hook(parameters, once)


def in_backward() -> bool:
    """Whether a backward pass is running, in which activation checkpointing recomputes layers."""
    return torch._C._current_graph_task_id() != -1


class HostClock:
    """Times on the CPU."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return end - start

    def burn(self, seconds: float) -> None:
        """Keep a core busy without holding the GIL, as a layer's own operators do."""
        until = time.perf_counter() + seconds
        with torch.no_grad():
            matrix = torch.ones(64, 64)
            while time.perf_counter() < until:
                torch.mm(matrix, matrix)


class GpuClock(HostClock):
    """Times on a GPU's current stream."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


def clock_of(layers: list[nn.Module]) -> HostClock:
    """The clock of the device that the layers are on."""
    on_gpu = any(p.device.type == "cuda" for layer in layers for p in layer.parameters())
    return GpuClock() if on_gpu else HostClock()


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
