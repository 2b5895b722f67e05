"""Runs under a plan, each compared with one process that trains the same model."""

from __future__ import annotations

from dataclasses import dataclass

from tests.distributed.test_context_parallelism import Mesh
from tests.distributed.test_meshes import ranks


@dataclass(frozen=True)
class Case:
    """`shared` are the flags that the run of one process has too."""

    name: str
    nproc: int
    shared: str
    own: str = ""
    meshes: tuple[Mesh, ...] = ()
    biases: bool = False
    """Whether the model has biases."""

    def __str__(self) -> str:
        return self.name


def across(name: str, shared: str, *meshes: Mesh, own: str = "") -> Case:
    """Across the meshes of a plan file."""
    return Case(name, ranks(list(meshes)), shared, own, meshes)
