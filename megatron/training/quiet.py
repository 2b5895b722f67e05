"""megatron-core without the remarks it makes at every start, and without what it never uses."""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock


def quiet_core() -> None:
    """Import megatron-core, and keep out of the output what it says of Apex and TransformerEngine.

    To be called before megatron-core is imported, by whatever a person starts. What a run makes of
    the two is said by the run itself.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    # megatron-core looks at `.grad` of views on purpose.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    _import_core()


def _import_core() -> None:
    """With a torch for CPUs alone its small functions stay as they are written.

    megatron-core marks them for torch's compiler as it is imported. Loading the compiler takes a
    fifth of a start, and compiling for a CPU needs a C++ compiler, for kernels meant for GPUs.
    With another torch the few that a run compiles are compiled in this process: the compiler would
    start a pool of others in each rank, one for a core, and wait for them in the end.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        with mock.patch("torch.compile", _as_written):
            import megatron.core
    else:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        import megatron.core  # noqa: F401


def _as_written(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return function if function is not None else _as_written
