"""Plan files: YAML with a list of meshes, each with its vendor, layers, sizes and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hetero.errors import Faults
from hetero.formatting import counted
from hetero.plan.limits import AT_LEAST_ONE
from hetero.plan.mesh import VENDORS, Mesh, PlanError
from hetero.plan.plan import Plan, split_over_chunks
from hetero.yaml_file import load_yaml

# Plan files describe pipelines; shares are for whole replicas.
_FIELDS = tuple(field.name for field in fields(Mesh) if field.name != "share")
KEYS = ("vendor", "layers", *_FIELDS[1:])
_MAX_CHUNKS = 1 << 10
"""Per stage. More are taken for a mistyped number."""


@dataclass(frozen=True)
class PlanFile:
    """The readable part of a plan file, and every problem found in it."""

    meshes: tuple[Mesh, ...]
    """Empty where one of them is invalid."""
    layers: tuple[tuple[int, ...], ...]
    """As `Plan.layers`; empty where those of a stage are invalid."""
    problems: tuple[str, ...]

    def plan(self) -> Plan:
        """Raises PlanError with all problems, if there are any."""
        if self.problems:
            raise PlanError(*self.problems)
        return Plan(meshes=self.meshes, layers=self.layers)


@dataclass
class _Entry:
    """One mesh of the file."""

    mesh: Mesh | None = None
    layers: list[tuple[int, ...]] | None = None
    faults: Faults = field(default_factory=Faults)


def read_mapping(data: object, *, source: str, chunks: int = 1) -> PlanFile:
    """Read what is valid of parsed YAML. `source` names the file in errors."""
    if not isinstance(data, Mapping) or not isinstance(data.get("meshes"), list):
        raise PlanError(f"{source}: expected a top-level list named 'meshes'")
    unknown = sorted(set(map(str, data)) - {"meshes"})
    problems = [f"unknown key {key!r}; the only one is 'meshes'" for key in unknown]
    entries = [_read_entry(entry, chunks=chunks) for entry in data["meshes"]]
    for index, entry in enumerate(entries):
        problems += [f"mesh {index}: {sentence}" for sentence in entry.faults.sentences]
    meshes = [entry.mesh for entry in entries if entry.mesh is not None]
    layers = [entry.layers for entry in entries if entry.layers is not None]
    if not entries:
        problems.append("the plan has no mesh; name at least one")
    return PlanFile(
        meshes=tuple(meshes) if len(meshes) == len(entries) else (),
        layers=tuple(chain(*layers)) if len(layers) == len(entries) else (),
        problems=tuple(f"{source}: {sentence}" for sentence in problems),
    )


def _read_entry(entry: object, *, chunks: int) -> _Entry:
    found = _Entry()
    faults = found.faults
    if not isinstance(entry, Mapping):
        faults.add([f"expected keys {', '.join(KEYS)}, not {entry!r}"])
        return found
    faults.add(
        f"unknown key {key!r}; the keys are {', '.join(KEYS)}"
        for key in map(str, entry)
        if key not in (*KEYS, "context")
    )
    faults.add(f"the key {key!r} is missing" for key in ("vendor", "layers") if key not in entry)
    listed = entry.get("layers")
    if isinstance(listed, list) and listed:
        # Stages that are alike have the same mistake, which is told once.
        read = [faults.read(partial(_chunks_from_entry, item, chunks=chunks)) for item in listed]
        if None not in read:
            found.layers = [stage for stage in read if stage is not None]
    elif "layers" in entry:
        faults.add(["'layers' must list the layers of each stage, as in [15, 15]"])
    stages = len(listed) if isinstance(listed, list) and listed else None
    known = {key: value for key, value in entry.items() if key in _FIELDS}
    # Substitute valid values for missing keys, which are reported already.
    mesh = faults.read(lambda: Mesh(**{"vendor": VENDORS[0], "stages": stages or 1} | known))
    if mesh is None:
        return found
    # Files may give the size of context parallelism, as long as there is none.
    if entry.get("context", 1) != 1:
        faults.add(["context parallelism is not available; leave 'context' out"])
    if stages not in (None, mesh.stages):
        stated = counted(mesh.stages, "stage")
        faults.add(
            [
                f"{stated} but layers for {stages}; leave 'stages' out, or list the layers of "
                f"{stated}"
            ]
        )
    elif "vendor" in entry and stages is not None:
        found.mesh = mesh
    return found


def _chunks_from_entry(item: object, *, chunks: int) -> tuple[int, ...]:
    counts: list[Any] = item if isinstance(item, list) else [item]
    if not all(type(count) is int for count in counts):
        raise PlanError(f"{item!r} is not a number of layers")
    if any(count < 0 for count in counts) or sum(counts) < 1:
        raise PlanError(f"a stage has layers {item}; {AT_LEAST_ONE}")
    if not isinstance(item, list):
        return split_over_chunks(sum(counts), chunks)
    if len(item) != chunks:
        raise PlanError(
            f"a stage lists {counted(len(item), 'chunk')} but the virtual pipeline size is {chunks}"
        )
    return tuple(item)


def read_plan_file(path: str | Path, *, chunks: int = 1) -> PlanFile:
    """Read what is valid of a plan file. Raises PlanError where it has no list of meshes."""
    if chunks > _MAX_CHUNKS:
        raise PlanError(
            f"--num-virtual-stages-per-pipeline-rank {chunks} is more than any stage has layers; "
            f"give at most {_MAX_CHUNKS}"
        )
    source = f"the plan {path}"
    data = load_yaml(path, source=source, refusal=PlanError)
    return read_mapping(data, source=source, chunks=chunks)


def load_plan(path: str | Path, *, chunks: int = 1) -> Plan:
    """Read a plan file. Raises PlanError with every problem found."""
    return read_plan_file(path, chunks=chunks).plan()
