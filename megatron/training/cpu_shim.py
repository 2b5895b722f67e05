"""Lets megatron-core run where there is no accelerator.

megatron-core 0.16.1 asks for `cuda` devices by name and compares tensor type names. On a machine
without a GPU this module answers for it: `cuda` means the CPU, and the handful of `torch.cuda`
functions that megatron-core calls act on the CPU. It does nothing where there is a GPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

# An optimizer loads it too, and it must have seen torch's functions before they are replaced.
import torch._dynamo
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_CORE_PATH = "/megatron/core/"


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _caller_is_core() -> bool:
    # Two frames up: the function mode, then whoever called the torch function.
    return _CORE_PATH in sys._getframe(2).f_code.co_filename


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects devices named `cuda` to the CPU for every torch function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
            kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _caller_is_core():
            # Five places in megatron-core compare this name with 'torch.cuda.FloatTensor' and kin.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _replacements() -> dict[str, Callable[..., Any]]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return {
        "torch.cuda.current_device": lambda: _CPU,
        "torch.cuda.synchronize": nothing,
        "torch.cuda.empty_cache": nothing,
        "torch.cuda.set_device": nothing,
        "torch.cuda.get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "torch.cuda.set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "torch.cuda.manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "torch.cuda.nvtx.range_push": nothing,
        "torch.cuda.nvtx.range_pop": nothing,
        "megatron.core.tensor_parallel.random._set_cuda_rng_state": (
            lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        ),
        "megatron.core.tensor_parallel.random._get_cuda_rng_state": (
            lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        ),
    }


@contextmanager
def cpu_shim() -> Iterator[None]:
    """Run the body with megatron-core on the CPU. Does nothing where there is an accelerator."""
    if torch.cuda.is_available():
        yield
        return
    # It warns on every recomputation that the CPU's random state changed, which here it must.
    chatty = logging.getLogger("megatron.core.tensor_parallel.random")
    level = chatty.level
    with ExitStack() as stack:
        chatty.setLevel(logging.ERROR)
        stack.callback(chatty.setLevel, level)
        for target, new in _replacements().items():
            stack.enter_context(mock.patch(target, new))
        stack.enter_context(_CudaMeansCpu())
        yield
