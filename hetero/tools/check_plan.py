"""Check a plan before any job starts, and print the placement of its ranks.

    hetero check-plan plan.yaml --world-size 16 --model llama3.1-8b --gpu-memory nvidia=80

Reports every problem at once, each with the nearest valid value; the exit code is then 2. Does not
import torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero.errors import UserError

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["check-plan", *sys.argv[1:]]))

from hetero.errors import Faults
from hetero.plan.file import PlanFile, read_plan_file
from hetero.plan.plan import (
    ATTENTION_BACKENDS,
    FP8_FORMATS,
    NO_FP8,
    RECOMPUTE,
    VENDORS,
    Mesh,
    Plan,
    context_problems,
    expert_rank_problems,
    layer_problems,
    mesh_names,
    micro_batch_sizes,
    tensor_problems,
    world_size_problems,
)
from hetero.plan.show import draw_edge, draw_meshes, draw_stage, nodes_of, notes
from hetero.planner.memory_limits import memory_problems
from hetero.planner.model_shape import ModelShape, model_from_flags, read_flags
from hetero.planner.plan_memory import stage_memory
from hetero.planner.training_options import TrainingOptions
from hetero.text import counted, integer, size_text
from hetero.tools import tool_command_line
from hetero.tools.planning.sequence_length import add_seq_length, seq_length_given

_UNLIMITED = 1 << 30
"""Micro-batches where no global batch is given: enough to fill any pipeline."""
_CHOICES = {
    "recompute-granularity": RECOMPUTE[1:],
    "attention-backend": ATTENTION_BACKENDS,
    "fp8-format": FP8_FORMATS,
}
"""What a model's file may say of options that a mesh takes from it."""
_MAX_RANKS = 1 << 20
"""More are taken for a mistyped number."""


@dataclass(frozen=True)
class _TrainingRun:
    """The model and its training options, as far as they are given."""

    flags: Mapping[str, Any]
    model: ModelShape | None
    options: TrainingOptions
    micro_batch: int | None
    """None where it is invalid."""
    global_batch: int | None
    chunks: int
    """Of each stage."""
    expert_tensor: int | None
    """Ranks that share each expert, of meshes that name none."""

    def micro_batches(self, plan: Plan) -> int:
        """Of a step; the nearest whole number where the global batch is no multiple."""
        if self.global_batch is None:
            return _UNLIMITED
        return max(round(self.global_batch / _sequences_per_step(plan)), 1)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return tool_command_line.run(lambda: _check(options))


def _check(options: argparse.Namespace) -> str:
    plan, run = _read(options)
    return "\n".join(_report(_resolved(plan, run), run, options))


def _read(options: argparse.Namespace) -> tuple[Plan, _TrainingRun]:
    """The plan and the training run. Raises UserError with every problem of both."""
    faults = Faults()
    for flag, values in (
        ("--gpus-per-node", options.gpus_per_node),
        ("--gpu-memory", options.gpu_memory),
    ):
        named = [vendor for vendor, _ in values]
        faults.add(
            f"{flag} names {vendor} {named.count(vendor)} times; give each vendor one number"
            for vendor in named
            if named.count(vendor) > 1
        )
    run = _read_run(options, faults)
    file = faults.read(lambda: read_plan_file(options.plan, chunks=run.chunks))
    if file is not None:
        meshes = [
            replace(mesh, expert_tensor=mesh.expert_tensor or run.expert_tensor)
            for mesh in file.meshes
        ]
        file = replace(file, meshes=tuple(meshes))
        faults.add(_problems(file, run, options))
    faults.refuse()
    assert file is not None
    return file.plan(), run


def _parser() -> argparse.ArgumentParser:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("plan", type=Path, metavar="FILE", help="the plan's YAML file")
    parser.add_argument("--world-size", type=integer(1), help="ranks that will be started")
    parser.add_argument(
        "--gpus-per-node",
        nargs="+",
        type=_vendor_value,
        default=[],
        metavar="VENDOR=N",
        help="GPUs of a node, such as nvidia=8 amd=4; default: 8",
    )
    parser.add_argument(
        "--gpu-memory",
        nargs="+",
        type=_vendor_value,
        default=[],
        metavar="VENDOR=GIB",
        help="memory of a GPU, such as nvidia=80 amd=192; refuses a plan that would not fit",
    )
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="YAML file of the run's flags, or the name of a preset",
    )
    add_seq_length(parser, default="the model file's")
    for name in ("micro-batch-size", "global-batch-size"):
        parser.add_argument(f"--{name}", type=integer(1), help="as of `hetero pretrain`")
    parser.add_argument(
        "--num-virtual-stages-per-pipeline-rank",
        type=integer(1),
        help="as of `hetero pretrain`",
    )
    return parser


def _vendor_value(text: str) -> tuple[str, int]:
    vendor, equals, number = text.partition("=")
    if vendor not in VENDORS or not equals:
        raise argparse.ArgumentTypeError(
            f"must be VENDOR=N, with one of {', '.join(VENDORS)}, not {text!r}"
        )
    return vendor, integer(1)(number)


def _read_run(options: argparse.Namespace, faults: Faults) -> _TrainingRun:
    """Read what is valid; add what is not to `faults`."""
    flags: dict[str, Any] = {}
    model = None
    if options.model is not None:
        flags, source = faults.read(lambda: read_flags(options.model)) or ({}, "")
        if source:
            flags |= seq_length_given(options)
            model = faults.read(lambda: model_from_flags(flags, source=source))
    else:
        if options.gpu_memory:
            faults.add(["--gpu-memory needs --model, from which a rank's memory follows"])
        if options.seq_length is not None:
            faults.add(["--seq-length needs --model, whose samples have that length"])
    sizes: dict[str, int | None] = {
        "micro-batch-size": 1,
        "global-batch-size": None,
        "num-virtual-stages-per-pipeline-rank": 1,
    }
    if model is not None and model.num_experts:
        sizes["expert-tensor-parallel-size"] = None
    for name in sizes:
        given = getattr(options, name.replace("-", "_"), None)
        value = flags.get(name, sizes[name]) if given is None else given
        if value is not None and (type(value) is not int or value < 1):
            faults.sentences.append(f"{name} is {value!r}; it must be a whole number of at least 1")
            value = None
        sizes[name] = value
    for name, choices in _CHOICES.items():
        if flags.get(name) not in (None, *choices):
            faults.add([f"{name} is {flags.pop(name)!r}; it must be one of {', '.join(choices)}"])
    return _TrainingRun(
        flags,
        model,
        faults.read(lambda: TrainingOptions.of_flags(flags)) or TrainingOptions(),
        micro_batch=sizes["micro-batch-size"],
        global_batch=sizes["global-batch-size"],
        chunks=sizes["num-virtual-stages-per-pipeline-rank"] or 1,
        expert_tensor=sizes.get("expert-tensor-parallel-size"),
    )


def _resolved(plan: Plan, run: _TrainingRun) -> Plan:
    flags = run.flags
    recompute = "selective" if flags.get("recompute-activations") else "none"
    return plan.resolved(
        micro_batch_size=run.micro_batch or 1,
        sequence_parallel=bool(flags.get("sequence-parallel")),
        recompute=flags.get("recompute-granularity", recompute),
        distributed_optimizer=bool(flags.get("use-distributed-optimizer")),
        attention_backend=flags.get("attention-backend"),
        fp8=flags.get("fp8-format") or NO_FP8,
    )


def _sequences_per_step(plan: Plan) -> int:
    """Sequences that a resolved plan's pipeline takes at once (micro-batch size x DP size)."""
    return (plan.meshes[0].micro_batch_size or 1) * plan.meshes[0].data


def _problems(file: PlanFile, run: _TrainingRun, options: argparse.Namespace) -> Iterator[str]:
    """Every problem of the file, and of the plan with this model and world size."""
    yield from file.problems
    meshes, world_size = file.meshes, options.world_size
    if not meshes:
        return
    if world_size is not None:
        yield from world_size_problems(meshes, world_size)
    is_dense = run.model is not None and not run.model.num_experts
    of_experts: list[str] = []
    for name, mesh in zip(mesh_names(meshes), meshes, strict=True):
        if is_dense and mesh.experts > 1:
            size = f"expert-parallel size {mesh.experts}"
            of_experts.append(f"{name}: {size}, and the model has no experts")
        else:
            of_experts += expert_rank_problems(mesh, name=f"{name}: ")
    yield from of_experts
    yield from _contradictions(meshes, run)
    if (ranks := sum(mesh.world_size for mesh in meshes)) > _MAX_RANKS:
        yield f"the plan has {counted(ranks, 'rank')}; at most {_MAX_RANKS} can be drawn"
    sizes: tuple[int, ...] = ()
    if run.micro_batch is not None:
        try:
            sizes = micro_batch_sizes(meshes, run.micro_batch)
        except UserError as error:
            yield from error.sentences
    if run.model is not None:
        if file.layers:
            yield from layer_problems([sum(chunks) for chunks in file.layers], run.model.layers)
        yield from _tensor_problems(meshes, run, run.model)
        yield from _context_problems(meshes, run, run.model)
        yield from _expert_problems(meshes, run, run.model)
    if not sizes:
        return
    step = sizes[0] * meshes[0].data
    if run.global_batch is not None and run.global_batch % step:
        near = max(round(run.global_batch / step), 1) * step
        yield (
            f"a global batch of {run.global_batch} must be a multiple of the "
            f"{counted(step, 'sequence')} of a step of the pipeline; the nearest is {near}"
        )
    # With more layers on a stage than in the model, an estimate would be meaningless.
    if (
        run.model is not None
        and not file.problems
        and not of_experts
        and max(map(sum, file.layers)) <= run.model.layers
    ):
        resolved = _resolved(file.plan(), run)
        memory = {vendor: gib * 2.0**30 for vendor, gib in options.gpu_memory}
        batches = run.micro_batches(resolved)
        yield from memory_problems(
            resolved, run.model, memory, micro_batches=batches, options=run.options
        )


def _contradictions(meshes: Sequence[Mesh], run: _TrainingRun) -> Iterator[str]:
    """Sizes of the run's flags, of which 1 is a script's default, that are not the plan's."""
    for flag, sizes in {
        "tensor-model-parallel-size": [mesh.tensor for mesh in meshes],
        "context-parallel-size": [mesh.context for mesh in meshes],
        "expert-model-parallel-size": [mesh.experts for mesh in meshes],
    }.items():
        given = run.flags.get(flag, 1)
        if given != 1 and set(sizes) != {given}:
            yield (
                f"{flag} {given} of the model contradicts the plan, which says "
                f"{' '.join(map(str, sizes))}; leave it out"
            )


def _tensor_problems(meshes: Sequence[Mesh], run: _TrainingRun, model: ModelShape) -> Iterator[str]:
    for name, mesh in zip(mesh_names(meshes), meshes, strict=True):
        counts = {
            "--num-attention-heads": model.heads,
            "--num-query-groups": model.query_groups,
            "--ffn-hidden-size": model.ffn,
        }
        if _is_sequence_parallel(mesh, run):
            counts["with sequence parallelism, --seq-length"] = model.seq_length
        elif mesh.tensor > 1 and model.latent is not None:
            yield (
                f"{name}: latent attention with tensor-parallel size {mesh.tensor} needs "
                "sequence_parallel: true"
            )
        yield from tensor_problems(counts, mesh.tensor, name=f"the tensor-parallel size of {name},")


def _context_problems(
    meshes: Sequence[Mesh], run: _TrainingRun, model: ModelShape
) -> Iterator[str]:
    for name, mesh in zip(mesh_names(meshes), meshes, strict=True):
        parts = mesh.tensor if _is_sequence_parallel(mesh, run) else 1
        size = f"the context-parallel size of {name},"
        yield from context_problems(model.seq_length, mesh.context, parts, name=size)


def _expert_problems(meshes: Sequence[Mesh], run: _TrainingRun, model: ModelShape) -> Iterator[str]:
    if not model.num_experts:
        return
    for name, mesh in zip(mesh_names(meshes), meshes, strict=True):
        sizes = {
            f"--num-experts {model.num_experts}": (model.num_experts, mesh.experts),
            f"--moe-ffn-hidden-size {model.expert_ffn}": (model.expert_ffn, mesh.ranks_per_expert),
        }
        for what, (size, ranks) in sizes.items():
            if size % ranks:
                yield f"{name}: {what} must be a multiple of the {counted(ranks, 'rank')} it is on"
        if mesh.tensor > 1 and not _is_sequence_parallel(mesh, run):
            yield (
                f"{name}: a mixture of experts with tensor-parallel size {mesh.tensor} needs "
                "sequence_parallel: true"
            )


def _is_sequence_parallel(mesh: Mesh, run: _TrainingRun) -> bool:
    own = mesh.sequence_parallel
    return bool(run.flags.get("sequence-parallel") if own is None else own)


def _report(plan: Plan, run: _TrainingRun, options: argparse.Namespace) -> Iterator[str]:
    nodes = nodes_of(plan, dict.fromkeys(VENDORS, 8) | dict(options.gpus_per_node))
    step = _sequences_per_step(plan)
    head = (
        f"{options.plan}: {counted(plan.num_layers, 'layer')} in {counted(plan.stages, 'stage')} "
        f"on {counted(plan.world_size, 'rank')} of {counted(len(nodes), 'node')}; "
        f"{counted(step, 'sequence')} in a step of the pipeline"
    )
    if run.global_batch is not None:
        head += f", {counted(run.micro_batches(plan), 'step')} in a global batch"
    yield head
    yield from draw_meshes(plan)
    yield ""
    for stage in range(plan.stages):
        yield from draw_stage(plan, stage, nodes, _memory_text(plan, stage, run))
        if stage < plan.stages - 1:
            model = run.model
            sequence = None if model is None else model.seq_length
            row = 0 if model is None else model.hidden * run.options.activation_bytes
            yield from draw_edge(plan, stage, sequence=sequence, bytes_of_row=row)
    if found := list(notes(plan, nodes)):
        yield ""
        yield from (f"note: {note}" for note in found)


def _memory_text(plan: Plan, stage: int, run: _TrainingRun) -> str:
    """Parameters and estimated memory of each rank of a stage."""
    if run.model is None:
        return ""
    found = stage_memory(
        plan, stage, run.model, micro_batches=run.micro_batches(plan), options=run.options
    )
    batches = "micro-batch" if found.micro_batches == 1 else "micro-batches"
    return (
        f"a rank: {found.parameters / 1e9:.3f}e9 parameters, estimated "
        f"{size_text(found.memory.peak)}: states {size_text(found.states)}, activations "
        f"{size_text(found.memory.activations)} ({found.micro_batches:.3g} {batches} in flight)"
    )
