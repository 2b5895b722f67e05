"""Plan files: YAML with a list of meshes, each with its vendor, layers, sizes and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hetero.errors import Faults, UserError
from hetero.plan.plan import NOT_NEGATIVE, VENDORS, Mesh, Plan, split_over_chunks
from hetero.text import counted
from hetero.yaml_file import load_yaml, missing_keys

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
        """Raises UserError with all problems, if there are any."""
        if self.problems:
            raise UserError(*self.problems)
        return Plan(meshes=self.meshes, layers=self.layers)


def read_mapping(data: object, *, source: str, chunks: int = 1) -> PlanFile:
    """Read what is valid of parsed YAML. `source` names the file in errors."""
    keys = list(map(str, data)) if isinstance(data, Mapping) else []
    unknown = sorted(set(keys) - {"meshes"})
    problems = [f"unknown key {key!r}; the only one is 'meshes'" for key in unknown]
    if not isinstance(data, Mapping) or not isinstance(data.get("meshes"), list):
        problems.append("expected a top-level list named 'meshes'")
        raise UserError(*(f"{source}: {sentence}" for sentence in problems))
    meshes: list[Mesh] = []
    layers: list[list[tuple[int, ...]]] = []
    for index, entry in enumerate(data["meshes"]):
        faults = Faults()
        mesh, stages = _read_entry(entry, faults, chunks=chunks)
        meshes += [mesh] if mesh is not None else []
        layers += [stages] if stages is not None else []
        problems += [f"mesh {index}: {sentence}" for sentence in faults.sentences]
    count = len(data["meshes"])
    if not count:
        problems.append("the plan has no mesh; name at least one")
    return PlanFile(
        meshes=tuple(meshes) if len(meshes) == count else (),
        layers=tuple(chain(*layers)) if len(layers) == count else (),
        problems=tuple(f"{source}: {sentence}" for sentence in problems),
    )


def _read_entry(
    entry: object, faults: Faults, *, chunks: int
) -> tuple[Mesh | None, list[tuple[int, ...]] | None]:
    """One mesh of the file and the layers of its stages; None where they are invalid."""
    if not isinstance(entry, Mapping):
        faults.add([f"expected keys {', '.join(KEYS)}, not {entry!r}"])
        return None, None
    faults.add(
        f"unknown key {key!r}; the keys are {', '.join(KEYS)}"
        for key in map(str, entry)
        if key not in KEYS
    )
    faults.add(
        f"the key {key!r} is missing" for key in missing_keys(entry, ("vendor", "layers"), KEYS)
    )
    listed: Any = entry.get("layers")
    stages = len(listed) if isinstance(listed, list) else 0
    layers = None
    if stages:
        # Stages that are alike have the same mistake, which is told once.
        read = [faults.read(partial(_chunks_from_entry, item, chunks=chunks)) for item in listed]
        layers = [stage for stage in read if stage is not None] if None not in read else None
    elif "layers" in entry:
        faults.add(["'layers' must list the layers of each stage, as in [15, 15]"])
    known = {key: value for key, value in entry.items() if key in _FIELDS}
    # Substitute valid values for missing keys, which are reported already.
    mesh = faults.read(lambda: Mesh(**{"vendor": VENDORS[0], "stages": stages or 1} | known))
    named = entry.get("stages", stages)
    is_count = type(named) is int and named > 0  # else the mesh has been refused for it
    if stages and is_count and named != stages:
        stated = counted(named, "stage")
        faults.add(
            [
                f"{stated} but layers for {stages}; leave 'stages' out, or list the layers of "
                f"{stated}"
            ]
        )
    is_complete = mesh is not None and "vendor" in entry and stages == mesh.stages
    return mesh if is_complete else None, layers


def _chunks_from_entry(item: object, *, chunks: int) -> tuple[int, ...]:
    counts: list[Any] = item if isinstance(item, list) else [item]
    if not all(type(count) is int for count in counts):
        raise UserError(f"{item!r} is not a number of layers")
    if any(count < 0 for count in counts) or not counts:
        raise UserError(f"a stage has layers {item}; {NOT_NEGATIVE}")
    if not isinstance(item, list):
        return split_over_chunks(sum(counts), chunks)
    if len(item) != chunks:
        raise UserError(
            f"a stage lists {counted(len(item), 'chunk')} but the virtual pipeline size is {chunks}"
        )
    return tuple(item)


def read_plan_file(path: str | Path, *, chunks: int = 1) -> PlanFile:
    """Read what is valid of a plan file. Raises UserError where it has no list of meshes."""
    if chunks > _MAX_CHUNKS:
        raise UserError(
            f"--num-virtual-stages-per-pipeline-rank {chunks} is more than any stage has layers; "
            f"give at most {_MAX_CHUNKS}"
        )
    source = f"the plan {path}"
    data = load_yaml(path, source=source)
    return read_mapping(data, source=source, chunks=chunks)


def load_plan(path: str | Path, *, chunks: int = 1) -> Plan:
    """Read a plan file. Raises UserError with every problem found."""
    return read_plan_file(path, chunks=chunks).plan()
