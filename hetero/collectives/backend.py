"""The backend `hetero` of torch.distributed: its registration, and which groups it replaces.

PyTorch calls `on_import_of_torch` when it is imported (entry point `torch.backends`). With
HETERO_INSTEAD_OF, which `hetero.run` sets, groups that a script makes with a backend named there
are made with `hetero`. Imports torch only inside functions: `hetero.run` starts before that.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from importlib.metadata import entry_points
from typing import Any

from hetero.errors import print_line
from hetero.observe.flight_recorder import set_buffer_size, watch_script
from hetero.startup.process import RANK_VARIABLE, is_launched, serve_launcher

INSTEAD_OF_VARIABLE = "HETERO_INSTEAD_OF"
"""A comma-separated list of backends that `hetero` replaces."""


def on_import_of_torch() -> None:
    """Register `hetero`, and have it replace other backends if HETERO_INSTEAD_OF names some."""
    serve_launcher()
    set_buffer_size()
    if is_launched() or os.environ.get(RANK_VARIABLE) == str(os.getpid()):
        watch_script()
    import torch.distributed as dist

    if not dist.is_available():
        return
    register()
    # A script that plays vendors is told where none of its groups crosses them.
    if os.environ.get(INSTEAD_OF_VARIABLE) or os.environ.get("HETERO_VENDOR"):
        replace_backends()


def replace_nccl() -> None:
    """Have `hetero` replace NCCL in the processes that this process starts or becomes.

    Prints a reason where it will not. HETERO_INSTEAD_OF of the user stays as it is.
    """
    os.environ.setdefault(INSTEAD_OF_VARIABLE, "nccl")
    if os.environ.get("LOCAL_RANK", "0") == "0" and (reason := _why_not_autoloaded()):
        print(
            f"hetero.run: groups that a script makes will not cross vendors: {reason}",
            file=sys.stderr,
            flush=True,
        )


def _why_not_autoloaded() -> str:
    """Returns why PyTorch will not call `on_import_of_torch` in child processes; "" if it will.

    A script that asks for NCCL then gets NCCL, whatever HETERO_INSTEAD_OF says.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is 0; unset it"
    if not any(entry.name == "hetero" for entry in entry_points(group="torch.backends")):
        return "this project is not installed for this Python; run pip install . in its folder"
    return ""


def register() -> None:
    """Make `hetero` a backend of torch.distributed. Idempotent."""
    import torch.distributed as dist

    if "hetero" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "hetero", _create_group, extended_api=True, devices=["cpu", "cuda"]
        )


def _create_group(options: Any, backend_options: Any = None) -> Any:
    from hetero.collectives.process_group import create_group  # with the first group: it is slow

    return create_group(options, backend_options)


def replace_backends() -> None:
    """Make each new group of a backend named in HETERO_INSTEAD_OF with `hetero`. Idempotent.

    Wraps the one function of torch through which every group is made. A script's own groups over
    gloo reach the other hosts too.
    """
    from torch.distributed import distributed_c10d as c10d

    from hetero.collectives.torch_patches import replace_nccl_version

    original = c10d._new_process_group_helper
    if hasattr(original, "__wrapped__"):
        return
    replace_nccl_version()
    signature = inspect.signature(original)

    @functools.cache
    def lead_to_rank_0() -> None:
        from hetero.startup.addresses import lead_gloo_towards

        if "MASTER_ADDR" in os.environ:
            lead_gloo_towards(os.environ["MASTER_ADDR"])

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        lead_to_rank_0()
        bound = signature.bind(*args, **kwargs)
        requested = bound.arguments["backend"]
        bound.arguments["backend"] = instead_of(requested)
        is_watched = (
            INSTEAD_OF_VARIABLE in os.environ  # pretrain_gpt.py, which opens links, removes it
            and bound.arguments["backend"] is requested
            and str(requested).lower() not in ("hetero", "fake")
            and not c10d._world.pg_map
            and bound.arguments["group_size"] > 1
        )
        vendors = _submit_vendor(**bound.arguments) if is_watched else None
        group, store = original(*bound.args, **bound.kwargs)
        if vendors is not None and bound.arguments["group_rank"] == 0:
            backend = c10d.get_backend(group) if group in c10d._world.pg_map else str(requested)
            _warn_of_one_library(vendors, backend)
        if bound.arguments["backend"] is not requested and group in c10d._world.pg_map:
            # Report the requested backend: scripts compare get_backend() with it.
            c10d._world.pg_map[group] = (requested, store)
        return group, store

    c10d._new_process_group_helper = new_group


def instead_of(backend: Any) -> Any:
    """`hetero` for a backend that HETERO_INSTEAD_OF names; any other as it is."""
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    replaced = {name.strip() for name in os.environ.get(INSTEAD_OF_VARIABLE, "").split(",")}
    if backend == Backend.UNDEFINED:  # none was requested: PyTorch chooses by device
        requested = set(map(str, BackendConfig(backend).get_device_backend_map().values()))
    else:
        requested = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    return Backend("hetero") if requested & replaced else backend


def _submit_vendor(*, store: Any, group_rank: int, group_size: int, **_: Any) -> Any:
    """Tell rank 0 this rank's vendor, before a first group that `hetero` does not make."""
    from hetero.plan import VENDOR_VARIABLE
    from hetero.startup.exchange import Exchange
    from hetero.startup.identity import built_vendor, own_vendor

    vendor = built_vendor()
    if os.environ.get(VENDOR_VARIABLE, "plan") != "plan":
        vendor = own_vendor()  # else only the build is looked at: a script may fork before CUDA
    vendors = Exchange(store, "hetero vendors", member=group_rank, size=group_size)
    vendors.submit({"vendor": vendor})
    return vendors


def _warn_of_one_library(exchange: Any, backend: str) -> None:
    """Warn, on rank 0 and once the first group was made, if its ranks are of several vendors."""
    if exchange.missing():  # a library that connects later, when all ranks have come
        return
    vendors = list(dict.fromkeys(told["vendor"] for told in exchange.wait(0.0)))
    if len(vendors) == 1:
        return
    print_line(
        f"hetero: warning: the ranks are {' and '.join(vendors)}, and the group of all of them is "
        f"plain {backend}, which crosses no vendors; set HETERO_INSTEAD_OF={backend}, or make "
        "groups with backend='hetero'"
    )
