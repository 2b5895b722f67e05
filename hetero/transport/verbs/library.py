"""pyverbs, as the distribution's rdma-core brings it, imported when it is first needed.

It is an extension for the distribution's own Python, found in a folder that holds many other
packages. Only pyverbs itself is taken from there: the rest would shadow the environment's.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero.errors import LinkError

_RELEASE = f"{sys.version_info[0]}.{sys.version_info[1]}"
PACKAGE_FOLDERS = (
    Path("/usr/lib/python3/dist-packages"),
    Path(f"/usr/lib64/python{_RELEASE}/site-packages"),
    Path(f"/usr/lib/python{_RELEASE}/site-packages"),
)
_REMEDY = (
    "install the distribution's package of it (Debian and Ubuntu: python3-pyverbs and "
    "ibverbs-providers; RHEL: python3-pyverbs and libibverbs) and run that distribution's release "
    "of Python, or choose another --hetero-transport"
)
_EVENT_FILE = "[infinibandevent]"
# Two threads that open devices at once would take each other's descriptors for their own.
_OPENING = threading.Lock()


@dataclass(frozen=True)
class Verbs:
    """The part of pyverbs that is used, under pyverbs' own names."""

    enums: Any
    error: type[Exception]
    Context: Any
    PD: Any
    MR: Any
    DmaBufMR: Any
    CompChannel: Any
    CQ: Any
    QP: Any
    QPAttr: Any
    QPCap: Any
    QPInitAttr: Any
    AHAttr: Any
    GlobalRoute: Any
    GID: Any
    SGE: Any
    SendWR: Any
    RecvWR: Any

    def open_context(self, name: str) -> tuple[Any, int | None]:
        """A device, and the descriptor that is readable when the device has news of itself.

        No pyverbs tells that descriptor. It is None where it cannot be made out.
        """
        with _OPENING:
            before = _event_descriptors()
            context = self.Context(name=name)
            new = _event_descriptors() - before
        return context, new.pop() if len(new) == 1 else None

    def open_channel(self, context: Any) -> tuple[Any, int]:
        """A completion channel and its descriptor, which pyverbs tells from release 57 on."""
        with _OPENING:
            before = _event_descriptors()
            channel = self.CompChannel(context)
            new = _event_descriptors() - before
        if hasattr(channel, "fd"):
            return channel, int(channel.fd)
        if len(new) != 1:
            channel.close()
            raise LinkError(
                "the descriptor of an RDMA completion channel cannot be found in /proc/self/fd; "
                "mount /proc, or install pyverbs 57 or newer"
            )
        return channel, new.pop()


def load(folders: Sequence[Path] = PACKAGE_FOLDERS) -> Verbs:
    """Import pyverbs. Raises LinkError, with what to install, where it is missing or unusable."""
    added = None
    if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
        added = next((f for f in folders if (f / "pyverbs/__init__.py").exists()), None)
        if added is None:
            raise LinkError(f"RDMA needs pyverbs, which is not installed; {_REMEDY}")
        _add_package(added / "pyverbs")
    try:
        return _without_its_log_handler(_import)
    except ImportError as error:
        if added is not None:
            del sys.modules["pyverbs"]
        raise LinkError(
            f"RDMA needs pyverbs, and Python {_RELEASE} cannot use the one installed ({error}); "
            f"{_REMEDY}"
        ) from error


def _import() -> Verbs:
    def part(name: str) -> ModuleType:
        return importlib.import_module(f"pyverbs.{name}")

    try:
        enums = part("libibverbs_enums")
    except ImportError:
        enums = part("enums")
    address, device, memory = part("addr"), part("device"), part("mr")
    queue, pair, request = part("cq"), part("qp"), part("wr")
    return Verbs(
        enums=enums,
        error=part("pyverbs_error").PyverbsError,
        Context=device.Context,
        PD=part("pd").PD,
        MR=memory.MR,
        DmaBufMR=memory.DmaBufMR,
        CompChannel=queue.CompChannel,
        CQ=queue.CQ,
        QP=pair.QP,
        QPAttr=pair.QPAttr,
        QPCap=pair.QPCap,
        QPInitAttr=pair.QPInitAttr,
        AHAttr=address.AHAttr,
        GlobalRoute=address.GlobalRoute,
        GID=address.GID,
        SGE=request.SGE,
        SendWR=request.SendWR,
        RecvWR=request.RecvWR,
    )


def _add_package(folder: Path) -> None:
    """Make one package importable without the others beside it."""
    spec = importlib.util.spec_from_file_location(
        "pyverbs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    spec.loader.exec_module(package)


def _without_its_log_handler(step: Callable[[], Verbs]) -> Verbs:
    """pyverbs configures the root logger when imported, unless that has a handler already."""
    root, stand_in = logging.getLogger(), logging.NullHandler()
    root.addHandler(stand_in)
    try:
        return step()
    finally:
        root.removeHandler(stand_in)


def _event_descriptors() -> set[int]:
    """This process's descriptors of RDMA events, of devices and of completion channels."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own descriptor, and others' that are closed by now
            continue
        if target.endswith(_EVENT_FILE):
            found.add(int(entry))
    return found
