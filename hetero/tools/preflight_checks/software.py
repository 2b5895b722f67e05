"""The software a node runs: the versions that the nodes must share, and what is out of range."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import InvalidRequirement, Requirement

from hetero.errors import UserError
from hetero.startup.identity import release_of
from hetero.version import __version__, core_version, require_supported_core, sources

_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions; empty where something is not there."""

    project: str
    python: str
    torch: str
    """The release alone, as in 2.12.1: what the nodes must share."""
    torch_build: str
    """What it was built for, as in cu130, rocm7.1 or cpu."""
    cuda: str
    rocm: str
    collectives: str
    """NCCL or RCCL and its version, as PyTorch was built with it."""
    megatron_core: str
    unmet: tuple[str, ...]
    """Requirements that this environment does not fulfil, and what it has instead."""
    another_core: str = ""
    """What is wrong where megatron.core is imported from elsewhere than pip's."""


def read_software() -> SoftwareFacts:
    build = str(torch.__version__).partition("+")[2]
    rocm, cuda = torch.version.hip or "", torch.version.cuda or ""
    return SoftwareFacts(
        project=f"{__version__} ({sources()})",
        python=platform.python_version(),
        torch=release_of(str(torch.__version__)),
        torch_build=build or (f"rocm{rocm}" if rocm else f"cu{cuda}" if cuda else "cpu"),
        cuda=cuda,
        rocm=rocm,
        collectives=_collectives(rocm, cuda),
        megatron_core=_core_version(),
        unmet=unmet_requirements(own_requirements()),
        another_core=_another_core(),
    )


def own_requirements() -> list[str]:
    """What this project requires: by the checkout's file, or as the installed package says.

    A checkout may be newer than what was installed from it.
    """
    if (_ROOT / "setup.py").is_file():
        return (_ROOT / "requirements.txt").read_text().splitlines()
    return metadata.requires("hetero-megatron") or []


def unmet_requirements(lines: Iterable[str]) -> tuple[str, ...]:
    """The requirements that the running environment does not fulfil."""
    unmet = []
    for line in lines:
        try:
            wanted = Requirement(line.split("#", 1)[0].strip())
        except InvalidRequirement:  # a comment, an empty line or an option of pip's
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = _installed(wanted.name)
        if not version:
            unmet.append(f"{wanted} is not installed")
        elif not wanted.specifier.contains(version, prereleases=True):
            unmet.append(f"{wanted} is wanted and {version} installed")
    return tuple(unmet)


def _core_version() -> str:
    try:
        return core_version()
    except UserError:
        return ""


def _another_core() -> str:
    """What is wrong where another megatron-core is imported than the one that pip has installed."""
    try:
        require_supported_core()
    except UserError as error:
        return str(error) if _core_version() != _installed("megatron-core") else ""
    return ""


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _collectives(rocm: str, cuda: str) -> str:
    if not (rocm or cuda):
        return ""
    try:
        version = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):  # a build without the library
        return ""
    return ("RCCL " if rocm else "NCCL ") + ".".join(map(str, version))
