"""Measure what the layers of a model cost on this GPU, for hetero plan.

    hetero profile-layers --out h200.json --yaml-cfg llama3.1-8b \\
        --tensor 1 2 4 8 --micro-batch 1 2 4 --recompute none full

Flags that are not its own are those of pretrain_gpt.py. One GPU is enough, or a CPU: a
tensor-parallel rank is measured alone with the shapes that it has among the others, and what they
send each other is computed from the bandwidth between them. Takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["profile-layers", *sys.argv[1:]]))

from hetero.errors import Faults, UserError
from hetero.plan.plan import NO_FP8, RECOMPUTE
from hetero.planner.fp8 import ALIGNMENT, divides
from hetero.planner.layer_profile import (
    MeasuredProfile,
    PassTimes,
    load_profile,
)
from hetero.planner.model_shape import COUNTS, UNSAID, ModelShape, model_shape
from hetero.text import counted, integer, number, size_text
from hetero.tools.operators.layer_flags import DTYPES, model_arguments
from hetero.tools.reports.page import write_whole
from hetero.tools.reports.text_table import aligned
from hetero.tools.tool_command_line import Parser, require_results_file, run
from megatron.hetero.console import progress_bar
from megatron.hetero.import_core import import_megatron_core

if TYPE_CHECKING:
    from hetero.tools.layer_profile.profiled_device import ProfiledDevice
    from hetero.tools.layer_profile.swept_points import Sweep, SweepResult
    from hetero.tools.preflight_checks.network import PathResult


_UNSTEADY = 0.2
"""More than a virtual machine's speed drifts in a minute."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return run(lambda: _measure(options), interrupted="no profile was written")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0], takes_run_flags=True)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON to write; one that is there keeps what it has of other accelerators",
    )
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help="what the cluster file calls this GPU; default: a built-in name that occurs in what "
        "the driver calls it, or `cpu`",
    )
    for flag, what, default in (
        ("--tensor", "tensor-parallel sizes", [1]),
        ("--micro-batch", "micro-batch sizes", [1]),
    ):
        parser.add_argument(flag, nargs="+", type=integer(1), default=default, help=what)
    parser.add_argument(
        "--sequence",
        nargs="+",
        type=integer(1),
        help="sequence lengths; default: that of --seq-length",
    )
    parser.add_argument(
        "--recompute",
        nargs="+",
        choices=RECOMPUTE,
        default=["none", "full"],
        help="what the backward pass computes again",
    )
    parser.add_argument(
        "--seconds-a-point",
        type=number(above=0),
        default=1.0,
        help="seconds for one stage at one point",
    )
    parser.add_argument(
        "--threads", type=integer(1), help="threads of a CPU; default: OMP_NUM_THREADS, or 1"
    )
    parser.add_argument(
        "--links",
        action="store_true",
        help="measure the links between two processes here too, and print what to put into the "
        "cluster file",
    )
    options, rest = parser.parse_known_args(argv)
    options.flags = rest
    return options


def _measure(options: argparse.Namespace) -> str:
    args, model, before = _read(options)
    import_megatron_core()
    from hetero.tools.layer_profile.profiled_device import device_here

    dtype = next(name for name, torch_name in DTYPES.items() if torch_name == args.params_dtype)
    described = {**asdict(model), "dtype": dtype}
    # A profile of an earlier version does not say its dtype.
    known = {} if before is None else {"dtype": dtype, **UNSAID, **before.model}
    if before is not None and _size_free(known) != _size_free(described):
        raise UserError(
            f"--out {options.out} is the profile of another model or dtype; name another file"
        )
    _require_possible(options, model, args)
    here = device_here(options.accelerator, threads=options.threads)
    swept, links = _sweep(options, args, here)
    accelerators = dict(before.accelerators) if before is not None else {}
    accelerators[here.accelerator] = measured = swept.profile
    profile = MeasuredProfile(accelerators=accelerators, model=described)
    write_whole(options.out, json.dumps(profile.to_mapping(), indent=1) + "\n")
    lines = [*_table(swept), *_cluster_lines(links), *_unsteady(swept.spread.values())]
    return "\n".join(
        [*lines, f"{options.out}: {counted(len(measured.points), 'point')} of {here.accelerator}"]
    )


def _read(
    options: argparse.Namespace,
) -> tuple[argparse.Namespace, ModelShape, MeasuredProfile | None]:
    """The model's flags, its shape, and the profile that is there. Raises UserError with all that
    is wrong with them and with --out."""
    faults = Faults()
    faults.read(lambda: require_results_file(options.out))
    before = None
    if options.out.exists() and not options.out.is_dir():
        before = faults.read(lambda: load_profile(options.out))
    args = faults.read(lambda: model_arguments(options.flags))
    model = None if args is None else faults.read(lambda: model_shape(args))
    faults.refuse()
    assert args is not None
    assert model is not None
    return args, model, before


def _precisions(args: argparse.Namespace) -> tuple[bool, ...]:
    """Whether layers are in fp8; both where the flags leave some of them in bf16."""
    if args.fp8_format is None:
        return (False,)
    return (True, False) if args.first_last_layers_bf16 else (True,)


def _require_possible(
    options: argparse.Namespace, model: ModelShape, args: argparse.Namespace
) -> None:
    """Refuse sizes that a run would refuse, all at once and before anything is measured."""
    faults, positions = Faults(), args.max_position_embeddings
    lengths = options.sequence or [args.seq_length]
    faults.sentences += [
        f"fp8 products need multiples of {ALIGNMENT}, and with --tensor {tensor}, "
        f"--micro-batch {micro_batch} and --sequence {length} a rank has others; leave them out"
        for tensor, micro_batch, length in product(options.tensor, options.micro_batch, lengths)
        if args.fp8_format is not None
        and not divides(
            model,
            tensor=tensor,
            rows=micro_batch * length,
            ranks_per_expert=tensor if model.num_experts else None,
        )
    ]
    if model.latent is not None:
        faults.sentences.append(
            "layers with latent attention are not measured; plan without a profile"
        )
    faults.sentences += [
        f"--tensor {tensor} does not divide {model.divided_sizes()}; leave it out"
        for tensor in options.tensor
        if not model.divides(tensor, sequence_parallel=False)
    ]
    if model.num_experts and max(options.tensor) > 1:
        faults.sentences.append(
            f"--tensor {max(options.tensor)}: the tokens that tensor-parallel ranks gather for "
            "experts are not there when one is measured alone; give --tensor 1"
        )
    faults.sentences += [
        f"--sequence {length} is more than the model's {positions} positions; leave it out"
        for length in options.sequence or []
        if length > positions
    ]
    faults.refuse()


def _sweep(
    options: argparse.Namespace, args: argparse.Namespace, here: ProfiledDevice
) -> tuple[SweepResult, list[PathResult]]:
    import torch

    from hetero.tools.layer_profile.profiled_device import wire_inside
    from hetero.tools.layer_profile.swept_points import Sweep, measure
    from hetero.tools.preflight_checks.network import measure_alone
    from megatron.hetero.cpu_shim import cpu_shim

    sweep = Sweep(
        tensor=tuple(sorted(set(options.tensor))),
        micro_batch=tuple(sorted(set(options.micro_batch))),
        seq_length=tuple(sorted(set(options.sequence or [args.seq_length]))),
        recompute=tuple(dict.fromkeys(options.recompute)),
        fp8=_precisions(args),
        seconds=options.seconds_a_point,
    )
    if options.links and torch.cuda.device_count() == 1:
        raise UserError(
            "--links needs two GPUs, and one is visible; make another visible, or leave it out"
        )
    links = measure_alone() if options.links else []
    wire = wire_inside(here.accelerator, links)
    if wire is None and max(sweep.tensor) > 1:
        raise UserError(
            f"--tensor {max(sweep.tensor)}: nothing says how fast ranks of {here.accelerator} "
            "reach each other; give --links to measure it"
        )
    # Every stage is released by a collection, which would look through all that was imported.
    gc.freeze()
    with cpu_shim(), progress_bar(total=sweep.stages(args), unit="stage", leave=False) as bar:

        def advance(text: str) -> None:
            bar.set_description(text)
            bar.update(1)

        swept = measure(args, sweep, here=here, wire=wire, advance=advance)
    profile = replace(swept.profile, source=_source(args, here, sweep))
    return replace(swept, profile=profile), links


def _size_free(model: dict[str, object]) -> dict[str, object]:
    """What costs depend on: a profile serves any number of layers and tokens."""
    return {key: value for key, value in model.items() if key not in COUNTS}


def _source(args: argparse.Namespace, here: ProfiledDevice, sweep: Sweep) -> str:
    shards = ""
    if max(sweep.tensor) > 1:
        shards = (
            "; tensor-parallel ranks alone, what they exchange computed from the bandwidth "
            "between them"
        )
    fp8 = "" if args.fp8_format is None else f", {args.fp8_format} {args.fp8_recipe}"
    return f"hetero profile-layers on {here.description}, {args.params_dtype}{fp8}{shards}"


def _table(swept: SweepResult) -> list[str]:
    measured = swept.profile
    has_fp8 = any(point.fp8 != NO_FP8 for point in measured.points)
    head = ["TP", "micro-batch", "tokens", "recompute", *(["fp8"] if has_fp8 else [])]
    head += ["layer fwd", "bwd"]
    has_experts = any(_takes_time(costs.sparse_layer) for costs in measured.points.values())
    if has_experts:
        head += ["with experts fwd", "bwd"]
    head += ["embedding", "head", "kept a layer", *(["with experts"] if has_experts else [])]
    rows = [[*head, "rounds differ"]]
    for point, costs in measured.points.items():
        layers = [costs.layer, *([costs.sparse_layer] if has_experts else [])]
        parts = costs.embedding, costs.head
        times = [
            *(seconds for layer in layers for seconds in (layer.forward, layer.backward)),
            *(part.forward + part.backward for part in parts),
        ]
        kept = [costs.layer_activation_bytes, costs.sparse_layer_activation_bytes]
        rows.append(
            [
                *(str(point.tensor), str(point.micro_batch), str(point.seq_length)),
                point.recompute,
                *([point.fp8] if has_fp8 else []),
                *(f"{1e3 * seconds:.3f} ms" for seconds in times),
                *map(size_text, kept[: len(layers)]),
                f"{swept.spread[point]:.0%}",
            ]
        )
    each = 1e9 * measured.optimizer_seconds_per_parameter
    fixed = 1e3 * measured.optimizer_seconds_fixed
    reduction = 1e9 * measured.reduction_seconds_per_parameter
    return [
        *aligned(rows, text={3, 4} if has_fp8 else {3}),
        f"update: {each:.3f} ms a million parameters and {fixed:.3f} ms",
        f"gradients scaled and added up: {reduction:.3f} ms a million parameters",
    ]


def _takes_time(part: PassTimes) -> bool:
    return part.forward + part.backward > 0


def _unsteady(spreads: Iterable[float]) -> list[str]:
    if max(spreads) <= _UNSTEADY:
        return []
    return [
        f"rounds differ by up to {max(spreads):.0%}: the machine is not quiet, or its processor is "
        "too slow for the GPU at small micro-batches; measure again before you plan with this"
    ]


def _cluster_lines(links: Sequence[PathResult]) -> list[str]:
    """What the links measured here come to in a cluster file."""
    return [
        f"link {path.path}: {path.error}"
        if path.error
        else f"link {path.path}: "
        + ", ".join(f"{key}: {figure:.1f}" for key, figure in path.rail_figures().items())
        for path in links
    ]
