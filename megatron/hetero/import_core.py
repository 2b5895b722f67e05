"""Imports megatron-core without its startup warnings and, where no GPU is, torch's compiler."""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock


def import_megatron_core() -> None:
    """Import megatron-core and suppress its warnings about missing Apex and TransformerEngine.

    Entry points must call this before anything imports megatron-core. The run's own overview says
    which of the two it uses.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    # megatron-core reads `.grad` of non-leaf tensors on purpose.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    _import_uncompiled()


def _import_uncompiled() -> None:
    """Import megatron-core; without a GPU, make `torch.compile` a no-op meanwhile.

    megatron-core decorates small functions with `torch.compile`. Importing the compiler takes a
    fifth of the startup time, compiling for a CPU needs a C++ compiler, and the compiler cannot
    trace what `cpu_shim` replaces. With a GPU the few functions are compiled in this process:
    Inductor would otherwise start a pool of one process per core in each rank, and wait for it at
    exit.
    """
    import torch

    if not torch.cuda.is_available():
        with mock.patch("torch.compile", _identity_compile):
            import megatron.core
    else:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        import megatron.core  # noqa: F401


def _identity_compile(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return function if function is not None else _identity_compile
