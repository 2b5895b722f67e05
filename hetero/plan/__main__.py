"""Check a plan before any job starts, and print where each of its ranks stands.

    python -m hetero.plan plan.yaml --world-size 16 --model llama3.1-8b --gpu-memory nvidia=80

What is wrong is told all at once, each with the nearest that would work; the exit code is then 2.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hetero.errors import Faults, Refusal, UserError, print_error
from hetero.help_text import HelpFormatter
from hetero.plan.limits import (
    layer_problems,
    mesh_names,
    micro_batch_sizes,
    tensor_problems,
    world_size_problems,
)
from hetero.plan.mesh import VENDORS, Mesh, PlanError
from hetero.plan.nodes import nodes_of
from hetero.plan.picture import draw_edge, draw_meshes, draw_stage, notes
from hetero.plan.plan import Plan
from hetero.plan.plan_file import PlanFile, read_plan_file
from hetero.planner.memory_limits import memory_problems
from hetero.planner.model_shape import ModelShape, model_from_flags, read_flags
from hetero.planner.plan_memory import stage_memory
from hetero.planner.training_options import TrainingOptions
from hetero.words import counted, size_text

_ANY_NUMBER = 1 << 30
"""Micro-batches where no global batch is given: the pipeline is as full as it gets."""
_MOST_RANKS = 1 << 20
"""More are nobody's plan: a number was mistyped."""


@dataclass(frozen=True)
class _Run:
    """What is known beside the plan: the model and how it is trained."""

    flags: Mapping[str, Any]
    model: ModelShape | None
    options: TrainingOptions
    micro_batch: int | None
    """None where it was refused."""
    global_batch: int | None

    def micro_batches(self, plan: Plan) -> int:
        return _ANY_NUMBER if self.global_batch is None else self.global_batch // _step(plan)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m hetero.plan --help")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(argv)
        plan, run = _read(options)
        print("\n".join(_drawing(_settled(plan, run), run, options)))
    except UserError as error:
        print_error(str(error))
        return error.exit_code
    return 0


def _read(options: argparse.Namespace) -> tuple[Plan, _Run]:
    """The plan and the model. Raises a Refusal with all that is wrong with either, or with both."""
    faults = Faults()
    chunks = options.num_virtual_stages_per_pipeline_rank
    file = faults.read(lambda: read_plan_file(options.plan, chunks=chunks))
    run = _run_of(options, faults)
    if file is not None:
        faults.sentences += _problems(file, run, options)
    faults.refuse(Refusal)
    assert file is not None
    return file.plan(), run


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hetero.plan",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("plan", type=Path, metavar="FILE", help="the plan's YAML file")
    parser.add_argument("--world-size", type=_whole, help="ranks that will be started")
    parser.add_argument(
        "--gpus-per-node",
        nargs="+",
        type=_of_vendor,
        default=[],
        metavar="VENDOR=N",
        help="GPUs of a node, such as nvidia=8 amd=4; left out: 8",
    )
    parser.add_argument(
        "--gpu-memory",
        nargs="+",
        type=_of_vendor,
        default=[],
        metavar="VENDOR=GIB",
        help="memory of a GPU, such as nvidia=80 amd=192; refuses a plan that would not fit",
    )
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="YAML file of the run's flags, or the name of one in examples/presets",
    )
    for name in ("micro-batch-size", "global-batch-size"):
        parser.add_argument(f"--{name}", type=_whole, help="as of pretrain_gpt.py")
    parser.add_argument(
        "--num-virtual-stages-per-pipeline-rank",
        type=_whole,
        default=1,
        help="as of pretrain_gpt.py",
    )
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _of_vendor(text: str) -> tuple[str, int]:
    vendor, _, number = text.partition("=")
    if vendor not in VENDORS:
        raise argparse.ArgumentTypeError(
            f"must be VENDOR=N, with one of {', '.join(VENDORS)}, not {text!r}"
        )
    return vendor, _whole(number)


def _run_of(options: argparse.Namespace, faults: Faults) -> _Run:
    """What can be known of it; what is wrong with it goes to `faults`."""
    flags: dict[str, Any] = {}
    model = None
    if options.model is not None:
        flags, source = faults.read(lambda: read_flags(options.model)) or ({}, "")
        if source:
            model = faults.read(lambda: model_from_flags(flags, source=source))
    elif options.gpu_memory:
        faults.sentences.append("--gpu-memory needs --model, from which a rank's memory follows")
    sizes: dict[str, int | None] = {"micro-batch-size": 1, "global-batch-size": None}
    for name in sizes:
        given = getattr(options, name.replace("-", "_"))
        value = flags.get(name, sizes[name]) if given is None else given
        if value is not None and (type(value) is not int or value < 1):
            faults.sentences.append(f"{name} is {value!r}; it must be a whole number of at least 1")
            value = None
        sizes[name] = value
    in_half = bool(flags.get("bf16") or flags.get("fp16"))
    weight = 2 if in_half else 4
    gradient = 4 if flags.get("bf16") and not flags.get("grad-reduce-in-bf16") else weight
    costs = TrainingOptions(
        activation_bytes=weight,
        parameter_bytes=weight,
        gradient_bytes=gradient,
        state_bytes=12 if in_half else 8,
        delay_weight_gradients=bool(flags.get("delay-wgrad-compute")),
    )
    micro, total = sizes.values()
    return _Run(flags, model, costs, micro_batch=micro, global_batch=total)


def _settled(plan: Plan, run: _Run) -> Plan:
    flags = run.flags
    recompute = "selective" if flags.get("recompute-activations") else "none"
    return plan.settled(
        micro_batch_size=run.micro_batch or 1,
        sequence_parallel=bool(flags.get("sequence-parallel")),
        recompute=flags.get("recompute-granularity", recompute),
        distributed_optimizer=bool(flags.get("use-distributed-optimizer")),
        attention_backend=flags.get("attention-backend"),
    )


def _step(plan: Plan) -> int:
    """Sequences of a step of the pipeline, of a settled plan."""
    return (plan.meshes[0].micro_batch_size or 1) * plan.meshes[0].data


def _problems(file: PlanFile, run: _Run, options: argparse.Namespace) -> Iterator[str]:
    """All that is wrong with the file, and with what it asks of the run, as far as it is known."""
    yield from file.problems
    meshes, world_size = file.meshes, options.world_size
    if not meshes:
        return
    if world_size is not None:
        yield from world_size_problems(meshes, world_size)
    if (ranks := sum(mesh.world_size for mesh in meshes)) > _MOST_RANKS:
        yield f"the plan has {counted(ranks, 'rank')}; at most {_MOST_RANKS} can be drawn"
    sizes: tuple[int, ...] = ()
    if run.micro_batch is not None:
        try:
            sizes = micro_batch_sizes(meshes, run.micro_batch)
        except PlanError as error:
            yield from error.sentences
    if run.model is not None:
        if file.layers:
            yield from layer_problems([sum(chunks) for chunks in file.layers], run.model.layers)
        yield from _split_problems(meshes, run, run.model)
    if not sizes:
        return
    step = sizes[0] * meshes[0].data
    if run.global_batch is not None and run.global_batch % step:
        near = max(round(run.global_batch / step), 1) * step
        yield (
            f"a global batch of {run.global_batch} must be a multiple of the "
            f"{counted(step, 'sequence')} of a step of the pipeline; the nearest is {near}"
        )
    # A stage with more layers than the model was mistyped: what it would hold says nothing.
    elif (
        run.model is not None
        and not file.problems
        and max(map(sum, file.layers)) <= run.model.layers
    ):
        settled = _settled(file.plan(), run)
        memory = {vendor: gib * 2.0**30 for vendor, gib in options.gpu_memory}
        batches = run.micro_batches(settled)
        yield from memory_problems(
            settled, run.model, memory, micro_batches=batches, options=run.options
        )


def _split_problems(meshes: Sequence[Mesh], run: _Run, model: ModelShape) -> Iterator[str]:
    for name, mesh in zip(mesh_names(meshes), meshes, strict=True):
        counts = {
            "--num-attention-heads": model.heads,
            "--num-query-groups": model.query_groups,
            "--ffn-hidden-size": model.ffn,
        }
        own = mesh.sequence_parallel
        if run.flags.get("sequence-parallel") if own is None else own:
            counts["with sequence parallelism, --seq-length"] = model.seq_length
        yield from tensor_problems(counts, mesh.tensor, name=f"the tensor-parallel size of {name},")


def _drawing(plan: Plan, run: _Run, options: argparse.Namespace) -> Iterator[str]:
    nodes = nodes_of(plan, dict.fromkeys(VENDORS, 8) | dict(options.gpus_per_node))
    step = _step(plan)
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
        yield from draw_stage(plan, stage, nodes, _detail(plan, stage, run))
        if stage < plan.stages - 1:
            model = run.model
            sequence = None if model is None else model.seq_length
            row = 0 if model is None else model.hidden * run.options.activation_bytes
            yield from draw_edge(plan, stage, sequence=sequence, bytes_of_row=row)
    if found := list(notes(plan, nodes)):
        yield ""
        yield from (f"note: {note}" for note in found)


def _detail(plan: Plan, stage: int, run: _Run) -> str:
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


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
