"""Checks of the --hetero- flags against each other; a plan's file is read and checked elsewhere."""

from argparse import Namespace
from collections.abc import Collection

from hetero.errors import UserError
from hetero.words import counted
from megatron.training.arguments.hetero import ALLOWED_WITHOUT_PIPELINE

# What a plan's file says in full, and these flags in short.
SHORTHAND = ("hetero_vendors", "hetero_pipeline_sizes", "hetero_pipeline_layers")


def check_hetero(args: Namespace, given: Collection[str]) -> None:
    if not args.hetero_pipeline:
        for flag in given:
            if flag.startswith("--hetero-") and flag not in ALLOWED_WITHOUT_PIPELINE:
                raise UserError(f"{flag} needs --hetero-pipeline; add it or remove {flag}")
        return
    if 2 * 2 * (args.hetero_chunk_kib or 0) > args.hetero_ring_mib * 1024:
        raise UserError(
            f"--hetero-ring-mib {args.hetero_ring_mib} does not hold two slots of "
            f"--hetero-chunk-kib {args.hetero_chunk_kib} in each direction; enlarge the ring or "
            "shrink the slots"
        )
    if args.hetero_plan is not None:
        for name in SHORTHAND:
            if getattr(args, name) is not None:
                raise UserError(
                    f"--hetero-plan and {_flag(name)} exclude each other; remove one of them"
                )
        return
    for name in ("hetero_vendors", "hetero_pipeline_sizes"):
        if getattr(args, name) is None:
            raise UserError(f"--hetero-pipeline needs {_flag(name)}, or a --hetero-plan; add it")
    if len(args.hetero_vendors) != len(args.hetero_pipeline_sizes):
        raise UserError(
            f"--hetero-vendors names {counted(len(args.hetero_vendors), 'mesh', 'meshes')} and "
            "--hetero-pipeline-sizes "
            f"{len(args.hetero_pipeline_sizes)}; give one size for each vendor"
        )
    layers = args.hetero_pipeline_layers
    if layers is not None and sum(layers) != args.num_layers:
        raise UserError(
            f"--hetero-pipeline-layers adds up to {sum(layers)}, but --num-layers is "
            f"{args.num_layers}"
        )


def derive_pipeline_size(args: Namespace) -> None:
    """The pipeline size, unless a plan that is yet to be read has to say it."""
    given = args.pipeline_model_parallel_size
    if args.hetero_pipeline_sizes is not None:
        stages = sum(args.hetero_pipeline_sizes)
        if given is not None and given != stages:
            raise UserError(
                f"--hetero-pipeline-sizes adds up to {counted(stages, 'stage')}, but "
                f"--pipeline-model-parallel-size is {given}; change one, or remove the latter"
            )
        args.pipeline_model_parallel_size = stages
    elif given is None and args.hetero_plan is None:
        args.pipeline_model_parallel_size = 1


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
