"""Checks of the --hetero- flags against each other. layout.py checks a plan's file."""

from argparse import Namespace
from collections.abc import Collection, Iterator

from hetero.text import counted
from megatron.hetero.arguments.flags_hetero import (
    ALLOWED_WITH_DATA_PARALLEL,
    ALLOWED_WITHOUT_PIPELINE,
    DATA_PARALLEL,
    MEASURED,
)

# The flags that a plan's file replaces; these have a value for each mesh.
PER_MESH = (
    "hetero_tensor_sizes",
    "hetero_data_sizes",
    "hetero_micro_batch_sizes",
    "hetero_recompute",
)
SHORTHAND = ("hetero_vendors", "hetero_pipeline_sizes", "hetero_pipeline_layers", *PER_MESH)


def check_hetero(args: Namespace, given: Collection[str]) -> tuple[Iterator[str], ...]:
    return (
        _check_absence(args, given),
        _check_replicas(args),
        _check_shares(args),
        _check_ring(args),
        _check_plan(args),
        _check_meshes(args),
        _check_values_of_meshes(args),
        _check_tensor_sizes(args),
        _check_layers(args),
    )


def _check_absence(args: Namespace, given: Collection[str]) -> Iterator[str]:
    if args.hetero_pipeline:
        return
    allowed = ALLOWED_WITHOUT_PIPELINE | DATA_PARALLEL
    if args.hetero_data_parallel is not None:
        allowed |= ALLOWED_WITH_DATA_PARALLEL
    for flag in given:
        if not flag.startswith("--hetero-") or flag in allowed:
            continue
        if flag in ALLOWED_WITH_DATA_PARALLEL:
            yield (
                f"{flag} needs --hetero-pipeline or --hetero-data-parallel; add one or remove "
                f"{flag}"
            )
        else:
            yield f"{flag} needs --hetero-pipeline; add it or remove {flag}"
    # Unknowable, so that no check of the sizes reports what adding or removing it puts right.
    for name in SHORTHAND:
        if vars(args).get(name) is not None:
            delattr(args, name)


def _check_replicas(args: Namespace) -> Iterator[str]:
    if args.hetero_data_parallel is None:
        return
    if args.hetero_pipeline:
        yield (
            "--hetero-data-parallel and --hetero-pipeline exclude each other; remove one: the "
            "first puts whole replicas on each vendor, the second stages of one pipeline"
        )
        # Unknowable, so that no other check reports it.
        del args.hetero_data_parallel
        return
    vendors = [vendor for vendor, _ in args.hetero_data_parallel]
    if len(vendors) == 1:
        yield (
            f"--hetero-data-parallel names {vendors[0]} alone; name a second vendor, or remove the "
            "flag: replicas of one vendor need none"
        )


def _check_shares(args: Namespace) -> Iterator[str]:
    if args.hetero_data_shares is None:
        return
    if args.hetero_data_parallel is None:
        yield "--hetero-data-shares needs --hetero-data-parallel; add it or remove the shares"
        args.hetero_data_shares = None
        return
    if args.hetero_data_shares == MEASURED:
        yield from _check_measured_shares(args)
        return
    vendors, shares = len(args.hetero_data_parallel), len(args.hetero_data_shares)
    if vendors != shares:
        yield (
            f"--hetero-data-shares has {counted(shares, 'number')} and --hetero-data-parallel "
            f"names {counted(vendors, 'vendor')}; give one number for each vendor"
        )
        # Unknowable, so that no check of the batch reports it.
        del args.hetero_data_shares


def _check_measured_shares(args: Namespace) -> Iterator[str]:
    """Refuse what would depend on shares that are measured only after the start."""
    if args.dataloader_type == "cyclic":
        yield (
            "--hetero-data-shares auto would let the order of --dataloader-type cyclic depend on a "
            "measurement; give the shares as numbers, or remove --dataloader-type"
        )
    if args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank:
        yield (
            "--hetero-data-shares auto may give a replica fewer micro batches than interleaving "
            "needs; give the shares as numbers, or remove the virtual stages"
        )


def _check_ring(args: Namespace) -> Iterator[str]:
    if args.hetero_pipeline and 2 * 2 * (args.hetero_chunk_kib or 0) > args.hetero_ring_mib * 1024:
        yield (
            f"--hetero-ring-mib {args.hetero_ring_mib} does not hold two slots of "
            f"--hetero-chunk-kib {args.hetero_chunk_kib} in each direction; enlarge the ring or "
            "shrink the slots"
        )


def _check_plan(args: Namespace) -> Iterator[str]:
    if not args.hetero_pipeline or args.hetero_plan is None:
        return
    short = [_flag(name) for name in SHORTHAND if getattr(args, name) is not None]
    if short:
        yield f"--hetero-plan and {' and '.join(short)} exclude each other; remove one of them"
        # The plan's file is checked with the others, and sizes that follow from these are not.
        for name in SHORTHAND:
            setattr(args, name, None)


def _check_meshes(args: Namespace) -> Iterator[str]:
    if not args.hetero_pipeline or args.hetero_plan is not None:
        return
    missing = [name for name in SHORTHAND[:2] if vars(args).get(name, "") is None]
    # Unknowable, so that no check of the meshes reports it.
    for name in missing:
        yield f"--hetero-pipeline needs {_flag(name)}, or a --hetero-plan; add it"
        delattr(args, name)
    vendors, sizes = args.hetero_vendors, args.hetero_pipeline_sizes
    if len(vendors) != len(sizes):
        yield (
            f"--hetero-vendors names {counted(len(vendors), 'mesh', 'meshes')} and "
            f"--hetero-pipeline-sizes {len(sizes)}; give one size for each vendor"
        )
        del args.hetero_vendors, args.hetero_pipeline_sizes


def _check_values_of_meshes(args: Namespace) -> Iterator[str]:
    if not args.hetero_pipeline or args.hetero_plan is not None:
        return
    meshes = len(args.hetero_vendors)
    for name in PER_MESH:
        values = vars(args).get(name)
        if values is not None and len(values) != meshes:
            yield (
                f"{_flag(name)} has {counted(len(values), 'value')} and --hetero-vendors names "
                f"{counted(meshes, 'mesh', 'meshes')}; give one value for each"
            )
            # Unknowable, so that no check of the ranks reports it.
            delattr(args, name)


def _check_tensor_sizes(args: Namespace) -> Iterator[str]:
    """Compare both ways to give tensor-parallel sizes. 1 is a script's default and no wish."""
    sizes, given = args.hetero_tensor_sizes, args.tensor_model_parallel_size
    if sizes is not None and given != 1 and set(sizes) != {given}:
        yield (
            f"--tensor-model-parallel-size {given} contradicts --hetero-tensor-sizes "
            f"{' '.join(map(str, sizes))}; remove the former"
        )


def _check_layers(args: Namespace) -> Iterator[str]:
    layers = args.hetero_pipeline_layers
    if args.hetero_pipeline and layers is not None and sum(layers) != args.num_layers:
        yield (
            f"--hetero-pipeline-layers adds up to {sum(layers)}, but --num-layers is "
            f"{args.num_layers}"
        )


def derive_pipeline_size(args: Namespace) -> Iterator[str]:
    """Set the pipeline size, unless a plan's file will.

    --pipeline-model-parallel-size 1 is a script's default and contradicts nothing.
    """
    given = args.pipeline_model_parallel_size
    # Unknowable rather than absent, if the flags that decide it are.
    del args.pipeline_model_parallel_size
    if args.hetero_pipeline_sizes is not None:
        stages = sum(args.hetero_pipeline_sizes)
        if given not in (None, 1, stages):
            yield (
                f"--hetero-pipeline-sizes adds up to {counted(stages, 'stage')}, but "
                f"--pipeline-model-parallel-size is {given}; change one, or remove the latter"
            )
        args.pipeline_model_parallel_size = stages
    elif args.hetero_plan is not None:
        args.pipeline_model_parallel_size = given
    elif not args.hetero_pipeline:
        args.pipeline_model_parallel_size = given or 1


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
