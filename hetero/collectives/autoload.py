"""What PyTorch calls when it is imported, where this project is installed.

It finds this through the entry point `torch.backends` of the package, so that a script need not say
that there is a backend `hetero`. With HETERO_INSTEAD_OF, which `hetero.run` sets, groups that a
script makes with one of the backends named there are made with `hetero`.
"""

from __future__ import annotations

import functools
import inspect
import os
from importlib.metadata import entry_points
from typing import Any

INSTEAD_OF_VARIABLE = "HETERO_INSTEAD_OF"
"""Names of backends, with commas between."""


def on_import_of_torch() -> None:
    """Make `hetero` known, and have it take the place of other backends if the launcher says so."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    register()
    if os.environ.get(INSTEAD_OF_VARIABLE):
        take_over()


def why_not_called() -> str:
    """Why PyTorch will not call the above in the processes that start from here; empty if it will.

    A script that asks for NCCL then gets NCCL, whatever the launcher says.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is 0; unset it"
    if not any(entry.name == "hetero" for entry in entry_points(group="torch.backends")):
        return "this project is not installed for this Python; run pip install . in its folder"
    return ""


def register() -> None:
    """Make `hetero` a backend of torch.distributed. May be called more than once."""
    import torch.distributed as dist

    if "hetero" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "hetero", _create_group, extended_api=True, devices=["cpu", "cuda"]
        )


def _create_group(options: Any, backend_options: Any = None) -> Any:
    # Imported with the first group, so that importing torch stays as fast as it is.
    from hetero.collectives.creation import create_group

    return create_group(options, backend_options)


def take_over() -> None:
    """Have each new group that asks for a backend named in HETERO_INSTEAD_OF get `hetero`.

    Every way to make a group goes through one function of torch, which is wrapped.
    """
    from torch.distributed import distributed_c10d as c10d

    original = c10d._new_process_group_helper
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments["backend"]
        bound.arguments["backend"] = instead_of(asked)
        group, store = original(*bound.args, **bound.kwargs)
        if bound.arguments["backend"] is not asked and group in c10d._world.pg_map:
            # Scripts compare it with what they asked for.
            c10d._world.pg_map[group] = (asked, store)
        return group, store

    c10d._new_process_group_helper = new_group


def instead_of(backend: Any) -> Any:
    """`hetero` for what asks for a backend that it takes the place of; all else as it is."""
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    taken = {name.strip() for name in os.environ.get(INSTEAD_OF_VARIABLE, "").split(",")}
    if backend == Backend.UNDEFINED:  # PyTorch goes by the device where a script names none
        asked = set(map(str, BackendConfig(backend).get_device_backend_map().values()))
    else:
        asked = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    return Backend("hetero") if asked & taken else backend
