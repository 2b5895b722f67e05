"""Fallback plans: what a job runs when a whole vendor is lost, on the nodes that are left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hetero.plan import load_plan

AUTO = "auto"
"""In place of a plan file: the planner chooses one."""
AUTO_FLAG = f"--hetero-fallback {AUTO}"
_CONFIG_FILE = "--yaml-cfg"
_FLAGS = frozenset(
    {"--hetero-plan", "--hetero-vendors", "--hetero-data-parallel", "--hetero-recompute"}
    | {"--hetero-tensor-sizes", "--hetero-context-sizes", "--hetero-data-sizes"}
    | {"--hetero-micro-batch-sizes", "--hetero-expert-sizes"}
    | {"--hetero-pipeline", "--hetero-pipeline-sizes", "--hetero-pipeline-layers"}
    | {"--hetero-data-shares"}
    | {"--tensor-model-parallel-size", "--pipeline-model-parallel-size"}
    | {"--context-parallel-size", "--hierarchical-context-parallel-sizes"}
    | {"--expert-model-parallel-size", "--expert-tensor-parallel-size"}
    | {"--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"}
    | {"--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"}
    | {"--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"}
    | {"--num-virtual-stages-per-pipeline-rank"}
    | {"--microbatch-group-size-per-virtual-pipeline-stage"}
)
"""Those that say how the ranks are laid out, which a plan file replaces."""


class Node(Protocol):
    """What a plan has to know of a node."""

    @property
    def vendor(self) -> str: ...
    @property
    def processes(self) -> int: ...
    @property
    def accelerator(self) -> str:
        """By its driver's name; empty without a GPU."""

    @property
    def memory(self) -> int:
        """Bytes for each process."""


NodeT = TypeVar("NodeT", bound=Node)


@dataclass(frozen=True)
class ChosenPlan(Generic[NodeT]):
    """A fallback plan, and the nodes that run it."""

    name: str
    """Its file, or what the planner has chosen."""
    text: str
    """Of a plan file."""
    nodes: tuple[NodeT, ...]
    """In the order of their ranks."""


@dataclass(frozen=True)
class Fallback:
    """A plan file, and the ranks that it needs."""

    file: str
    text: str
    """What the file says: other nodes need not have it."""
    meshes: tuple[tuple[str, int], ...]
    """Vendor and number of ranks of each mesh, in order."""

    @classmethod
    def read(cls, file: str) -> Fallback:
        """Raises UserError for a file that is no plan."""
        meshes = load_plan(file).meshes
        return cls(
            file,
            Path(file).read_text("utf-8"),
            tuple((mesh.vendor, mesh.world_size) for mesh in meshes),
        )

    def choose(self, nodes: Iterable[NodeT]) -> ChosenPlan[NodeT] | None:
        """The nodes for the plan in the order of its meshes, each of one vendor; None: too few."""
        left, chosen = list(nodes), list[NodeT]()
        for vendor, ranks in self.meshes:
            missing = ranks
            for node in [one for one in left if one.vendor == vendor]:
                if node.processes <= missing:
                    missing -= node.processes
                    chosen.append(node)
                    left.remove(node)
            if missing:
                return None
        return ChosenPlan(self.file, self.text, tuple(chosen))


def words_with_plan(words: Sequence[str], file: str) -> list[str]:
    """A training command's words with a plan file in place of its own layout.

    Raises UserError if one of its --yaml-cfg files cannot be read.
    """
    return [*words_without_layout(words), "--hetero-pipeline", "--hetero-plan", file]


def words_without_layout(words: Sequence[str]) -> list[str]:
    """A training command's words without its own layout, those of its --yaml-cfg files included.

    Raises UserError if such a file cannot be read.
    """
    kept, is_dropped = [], False
    for word in _expanded(words):
        if word.startswith("--"):
            is_dropped = word.partition("=")[0].replace("_", "-") in _FLAGS
        if not is_dropped:
            kept.append(word)
    return kept


def _expanded(words: Sequence[str]) -> list[str]:
    """With the flags of --yaml-cfg files in the files' place."""
    if not any(word.partition("=")[0] == _CONFIG_FILE for word in words):
        return list(words)
    # Only here: a launcher has no other use for it.
    from megatron.hetero.arguments.config_file import expand_config_files
    from megatron.hetero.arguments.parser import build_parser

    first = next(place for place, word in enumerate(words) if word.startswith("--"))
    flags, _ = expand_config_files(words[first:], build_parser())
    return [*words[:first], *flags]
