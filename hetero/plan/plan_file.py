"""Plan files: YAML with a list of meshes, each with its vendor, layers, sizes and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hetero.plan.mesh import Mesh, PlanError
from hetero.plan.plan import Plan, split_over_chunks
from hetero.words import counted

# A plan file says how meshes divide a pipeline, in which a mesh has no share of replicas.
_FIELDS = tuple(field.name for field in fields(Mesh) if field.name != "share")
KEYS = ("vendor", "layers", *_FIELDS[1:])


def plan_from_mapping(data: object, *, source: str, chunks: int = 1) -> Plan:
    """Read a plan out of parsed YAML. `source` names it in errors."""
    if not isinstance(data, Mapping) or not isinstance(data.get("meshes"), list):
        raise PlanError(f"{source}: expected a top-level list named 'meshes'")
    unknown = sorted(set(map(str, data)) - {"meshes"})
    problems = [f"{source}: unknown key {key!r}; the only one is 'meshes'" for key in unknown]
    meshes, layers = [], []
    for index, entry in enumerate(data["meshes"]):
        try:
            mesh, mesh_layers = _mesh_from_mapping(entry, chunks=chunks)
        except PlanError as error:
            problems += [f"{source}: mesh {index}: {sentence}" for sentence in error.sentences]
        else:
            meshes.append(mesh)
            layers.extend(mesh_layers)
    if problems:
        raise PlanError(*problems)
    try:
        return Plan(meshes=tuple(meshes), layers=tuple(layers))
    except PlanError as error:
        raise PlanError(*(f"{source}: {sentence}" for sentence in error.sentences)) from error


def _mesh_from_mapping(entry: object, *, chunks: int) -> tuple[Mesh, list[tuple[int, ...]]]:
    if not isinstance(entry, Mapping):
        raise PlanError(f"expected keys {', '.join(KEYS)}")
    problems = [
        f"unknown key {key!r}; the keys are {', '.join(KEYS)}"
        for key in map(str, entry)
        if key not in KEYS
    ]
    problems += [f"the key {key!r} is missing" for key in ("vendor", "layers") if key not in entry]
    layers: list[tuple[int, ...]] = []
    listed = entry.get("layers")
    if isinstance(listed, list) and listed:
        for item in listed:
            try:
                layers.append(_chunks_from_entry(item, chunks=chunks))
            except PlanError as error:
                problems += error.sentences
    elif "layers" in entry:
        problems.append("'layers' must list the layers of each stage, as in [15, 15]")
    stages = max(len(listed), 1) if isinstance(listed, list) else 1
    known = {key: value for key, value in entry.items() if key in _FIELDS}
    if "vendor" not in entry:
        raise PlanError(*problems)
    try:
        mesh = Mesh(**{"stages": stages} | known)
    except PlanError as error:
        raise PlanError(*problems, *error.sentences) from error
    if not problems and mesh.stages != stages:
        problems.append(
            f"{counted(mesh.stages, 'stage')} but layers for {stages}; leave 'stages' out, or list "
            f"the layers of {counted(mesh.stages, 'stage')}"
        )
    if problems:
        raise PlanError(*problems)
    return mesh, layers


def _chunks_from_entry(item: object, *, chunks: int) -> tuple[int, ...]:
    if isinstance(item, int) and not isinstance(item, bool):
        return split_over_chunks(item, chunks)
    if isinstance(item, list) and all(type(count) is int for count in item):
        if len(item) != chunks:
            raise PlanError(
                f"a stage lists {counted(len(item), 'chunk')} but the virtual pipeline size is "
                f"{chunks}"
            )
        return tuple(item)
    raise PlanError(f"{item!r} is not a number of layers")


class StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key may stand once: the last of two would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def load_plan(path: str | Path, *, chunks: int = 1) -> Plan:
    """Read a plan file. Raises PlanError, in one sentence, for anything wrong with it."""
    try:
        data = yaml.load(Path(path).read_text("utf-8"), Loader=StrictLoader)
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"the plan {path} is not UTF-8 text") from error
    # What a number or a date of YAML cannot be is a ValueError of Python's.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = " ".join(str(error).split())
        raise PlanError(f"the plan {path} is not valid YAML: {place}") from error
    return plan_from_mapping(data, source=f"the plan {path}", chunks=chunks)
