"""Lets megatron-core run without an accelerator, by mapping `cuda` to the CPU.

megatron-core names `cuda` devices explicitly and compares tensor type names. Without a GPU,
`cpu_shim` redirects such devices to the CPU and replaces the few `torch.cuda` functions that
megatron-core calls. With a GPU it does nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch

# torch.optim imports it later, but it must capture torch's functions before they are patched.
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
    # Frame 1 is __torch_function__, frame 2 the caller of the torch function, or torch's handler of
    # `with torch.device(...)` between them.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == torch.utils._device.__file__:
        frame = frame.f_back
    return frame is not None and _CORE_PATH in frame.f_code.co_filename


class _CudaToCpu(TorchFunctionMode):
    """Replaces `cuda` device arguments of torch functions by the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory") and _caller_is_core():
            # Also where it names the CPU, for a copy to the GPU.
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _caller_is_core():
            # megatron-core compares type names with 'torch.cuda.FloatTensor' and the like.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream(torch.cpu.Stream):
    """On which everything is done at once."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event() if event is None else event

    def synchronize(self) -> None:
        pass


def _replacements() -> dict[str, Callable[..., Any]]:
    def no_op(*args: Any, **kwargs: Any) -> None:
        return None

    def split_sizes(sizes: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return sizes.numpy() if as_numpy and torch.is_tensor(sizes) else sizes

    return {
        "torch.cuda.current_device": lambda: _CPU,
        "torch.cuda.current_stream": lambda device=None: torch.cpu.current_stream(),
        "torch.cuda.Stream": _Stream,
        "torch.cuda.stream": torch.cpu.stream,
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": split_sizes,
        "torch.cuda.synchronize": no_op,
        "torch.cuda.empty_cache": no_op,
        "torch.cuda.set_device": no_op,
        "torch.cuda.get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "torch.cuda.set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "torch.cuda.manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "torch.cuda.nvtx.range_push": no_op,
        "torch.cuda.nvtx.range_pop": no_op,
        "megatron.core.tensor_parallel.random._set_cuda_rng_state": (
            lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        ),
        "megatron.core.tensor_parallel.random._get_cuda_rng_state": (
            lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        ),
    }


@contextmanager
def cpu_shim() -> Iterator[None]:
    """Run the body with megatron-core on the CPU. No-op if there is an accelerator."""
    if torch.cuda.is_available():
        yield
        return
    # It warns on every recomputation that the CPU RNG state changed, which is intended here.
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    level = logger.level
    with ExitStack() as stack:
        logger.setLevel(logging.ERROR)
        stack.callback(logger.setLevel, level)
        for target, new in _replacements().items():
            stack.enter_context(mock.patch(target, new))
        stack.enter_context(_CudaToCpu())
        yield
