"""Rules of the parallel sizes, and the sizes derived from the world size.

The meshes of a pipeline across vendors are those of a plan file or of its shorthand flags; from
here on both are the same values.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Iterator

from hetero.errors import UserError
from hetero.plan.file import PlanFile, read_plan_file
from hetero.plan.plan import (
    Mesh,
    context_problems,
    layer_problems,
    tensor_problems,
    world_size_problems,
)
from hetero.text import counted
from megatron.hetero.arguments.flags_hetero import (
    ALLOWED_WITH_DATA_PARALLEL,
    ALLOWED_WITHOUT_PIPELINE,
    DATA_PARALLEL,
    MEASURED,
)
from megatron.hetero.arguments.model import ENGINE, LOCAL_ONLY, local_only_problems
from megatron.hetero.arguments.rules import (
    Note,
    Rule,
    Values,
    Verdict,
    absent,
    flag_of,
    one_for_each_mesh,
    rule,
)

# The flags that a plan file replaces; these have a value for each mesh.
PER_MESH = (
    "hetero_tensor_sizes",
    "hetero_context_sizes",
    "hetero_data_sizes",
    "hetero_expert_sizes",
    "hetero_micro_batch_sizes",
    "hetero_recompute",
)
SHORTHAND = ("hetero_vendors", "hetero_pipeline_sizes", "hetero_pipeline_layers", *PER_MESH)
_ACCOUNTED = "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
_ENDS = "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"


@rule("hetero_pipeline typed_flags", flags="hetero_data_parallel")
def _without_pipeline(args: Namespace) -> Iterator[str]:
    if args.hetero_pipeline:
        return
    allowed = ALLOWED_WITHOUT_PIPELINE | DATA_PARALLEL
    if args.hetero_data_parallel is not None:
        allowed |= ALLOWED_WITH_DATA_PARALLEL
    for flag in args.typed_flags:
        if not flag.startswith("--hetero-") or flag in allowed:
            continue
        if flag in ALLOWED_WITH_DATA_PARALLEL:
            yield (
                f"{flag} needs --hetero-pipeline or --hetero-data-parallel; add one or remove "
                f"{flag}"
            )
        else:
            yield f"{flag} needs --hetero-pipeline; add it or remove {flag}"


@rule("hetero_pipeline", sets="hetero_data_parallel")
def _replicas(args: Namespace) -> Verdict:
    replicas = args.hetero_data_parallel
    if replicas is not None and args.hetero_pipeline:
        yield (
            "--hetero-data-parallel and --hetero-pipeline exclude each other; remove one: the "
            "first puts whole replicas on each vendor, the second stages of one pipeline"
        )
        return {}
    if replicas is not None and len(replicas) == 1:
        yield (
            f"--hetero-data-parallel names {replicas[0][0]} alone; name a second vendor, or remove "
            "the flag: replicas of one vendor need none"
        )
    return {"hetero_data_parallel": replicas}


@rule("hetero_data_parallel", sets="hetero_data_shares")
def _shares(args: Namespace) -> Verdict:
    shares = args.hetero_data_shares
    if shares is None:
        return {"hetero_data_shares": None}
    if args.hetero_data_parallel is None:
        yield "--hetero-data-shares needs --hetero-data-parallel; add it or remove the shares"
        return {"hetero_data_shares": None}
    vendors = len(args.hetero_data_parallel)
    if shares != MEASURED and vendors != len(shares):
        yield (
            f"--hetero-data-shares has {counted(len(shares), 'number')} and --hetero-data-parallel "
            f"names {counted(vendors, 'vendor')}; give one number for each vendor"
        )
        return {}
    return {"hetero_data_shares": shares}


@rule("hetero_data_parallel hetero_data_shares", flags="dataloader_type")
def _order_of_measured_shares(args: Namespace) -> Iterator[str]:
    is_measured = args.hetero_data_parallel is not None and args.hetero_data_shares == MEASURED
    if is_measured and args.dataloader_type == "cyclic":
        yield (
            "--hetero-data-shares auto would let the order of --dataloader-type cyclic depend on a "
            "measurement; give the shares as numbers, or remove --dataloader-type"
        )


@rule(
    "hetero_data_parallel hetero_data_shares num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank"
)
def _interleaving_of_measured_shares(args: Namespace) -> Iterator[str]:
    chunks = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank
    is_measured = args.hetero_data_parallel is not None and args.hetero_data_shares == MEASURED
    if is_measured and chunks:
        yield (
            "--hetero-data-shares auto may give a replica fewer micro batches than interleaving "
            "needs; give the shares as numbers, or remove the virtual stages"
        )


@rule("hetero_pipeline hetero_chunk_kib hetero_ring_mib")
def _ring(args: Namespace) -> Iterator[str]:
    if args.hetero_pipeline and 2 * 2 * (args.hetero_chunk_kib or 0) > args.hetero_ring_mib * 1024:
        yield (
            f"--hetero-ring-mib {args.hetero_ring_mib} does not hold two slots of "
            f"--hetero-chunk-kib {args.hetero_chunk_kib} in each direction; enlarge the ring or "
            "shrink the slots"
        )


@rule("hetero_pipeline typed_flags", flags="hetero_plan")
def _plan_and_shorthand(args: Namespace) -> Iterator[str]:
    short = [flag for flag in map(flag_of, SHORTHAND) if flag in args.typed_flags]
    if args.hetero_pipeline and args.hetero_plan is not None and short:
        yield f"--hetero-plan and {' and '.join(short)} exclude each other; remove one of them"


@rule("hetero_pipeline hetero_plan num_virtual_stages_per_pipeline_rank", sets="plan_file")
def _plan_file(args: Namespace) -> Verdict:
    if args.hetero_plan is None:
        return {"plan_file": None}
    if not args.hetero_pipeline:
        return {}
    file = read_plan_file(args.hetero_plan, chunks=args.num_virtual_stages_per_pipeline_rank or 1)
    yield from file.problems
    return {"plan_file": file}


@rule("plan_file num_layers")
def _layers_of_plan(args: Namespace) -> Iterator[str]:
    if args.plan_file is not None and args.plan_file.layers:
        layers = [sum(chunks) for chunks in args.plan_file.layers]
        yield from layer_problems(layers, args.num_layers)


@rule("plan_file hetero_plan optimizer")
def _optimizer_of_plan(args: Namespace) -> Iterator[str]:
    meshes = _meshes_of(args.plan_file)
    shared = [str(i) for i, mesh in enumerate(meshes) if mesh.distributed_optimizer]
    if shared and args.optimizer != "adam":
        yield (
            f"the plan {args.hetero_plan}: distributed_optimizer shares out Adam's state alone, "
            f"and --optimizer is {args.optimizer}; leave it out of mesh {', '.join(shared)}, or "
            "use --optimizer adam"
        )


@rule(f"plan_file hetero_plan {LOCAL_ONLY}")
def _engine_of_plan(args: Namespace) -> Iterator[str]:
    if any(mesh.transformer_impl == ENGINE for mesh in _meshes_of(args.plan_file)):
        for said in local_only_problems(args):
            yield f"the plan {args.hetero_plan} has meshes of {ENGINE}, and {said}"


@rule("plan_file hetero_plan", flags="tensor_model_parallel_size context_parallel_size")
def _sizes_of_plan(args: Namespace) -> Iterator[str]:
    meshes = _meshes_of(args.plan_file)
    for name, sizes in (
        ("tensor_model_parallel_size", [mesh.tensor for mesh in meshes]),
        ("context_parallel_size", [mesh.context for mesh in meshes]),
    ):
        given = getattr(args, name)
        if sizes and given not in (None, 1) and set(sizes) != {given}:
            yield _contradiction(args, name, given, sizes)


def _contradiction(args: Namespace, name: str, given: int, sizes: list[int]) -> str:
    return (
        f"{flag_of(name)} {given} contradicts the plan {args.hetero_plan}, which says "
        f"{' '.join(map(str, sizes))}; leave the flag out"
    )


def _meshes_of(file: PlanFile | None) -> tuple[Mesh, ...]:
    return () if file is None else file.meshes


def _needed(name: str) -> Rule:
    @rule("hetero_pipeline", flags=f"{name} hetero_plan")
    def is_given(args: Namespace) -> Iterator[str]:
        if args.hetero_pipeline and args.hetero_plan is None and getattr(args, name) is None:
            yield f"--hetero-pipeline needs {flag_of(name)}, or a --hetero-plan; add it"

    return is_given


@rule("hetero_pipeline plan_file", sets="hetero_vendors hetero_pipeline_sizes")
def _vendors_and_sizes(args: Namespace) -> Verdict:
    given = {name: getattr(args, name) for name in ("hetero_vendors", "hetero_pipeline_sizes")}
    if not args.hetero_pipeline:
        return absent(given)
    if (file := args.plan_file) is not None:
        if not file.meshes:
            return {}
        return {
            "hetero_vendors": [mesh.vendor for mesh in file.meshes],
            "hetero_pipeline_sizes": [mesh.stages for mesh in file.meshes],
        }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) < len(given):
        return found
    vendors, sizes = (len(value) for value in found.values())
    if vendors != sizes:
        yield (
            f"--hetero-vendors names {counted(vendors, 'mesh', 'meshes')} and "
            f"--hetero-pipeline-sizes {sizes}; give one size for each vendor"
        )
        return {}
    return found


def _values_of_meshes(name: str, field: str) -> Rule:
    """One value for each mesh, or None."""

    @rule("hetero_pipeline plan_file hetero_vendors", sets=name)
    def values_of_meshes(args: Namespace) -> Verdict:
        if not args.hetero_pipeline:
            return absent({name: getattr(args, name)})
        if args.plan_file is not None:
            return {name: [getattr(mesh, field) for mesh in args.plan_file.meshes]}
        return (yield from one_for_each_mesh(args, name))

    return values_of_meshes


@rule("hetero_pipeline plan_file", sets="hetero_pipeline_layers")
def _layers_of_meshes(args: Namespace) -> Values:
    layers = args.hetero_pipeline_layers
    if not args.hetero_pipeline:
        return absent({"hetero_pipeline_layers": layers})
    return {"hetero_pipeline_layers": None if args.plan_file is not None else layers}


@rule("hetero_pipeline hetero_pipeline_layers num_layers")
def _sum_of_layers(args: Namespace) -> Iterator[str]:
    layers = args.hetero_pipeline_layers
    if args.hetero_pipeline and layers is not None and sum(layers) != args.num_layers:
        yield (
            f"--hetero-pipeline-layers adds up to {sum(layers)}, but --num-layers is "
            f"{args.num_layers}"
        )


def _both_ways(size: str, sizes: str) -> Rule:
    """Compare the flag of one size and that of a size a mesh. 1 is a script's default, no wish."""

    @rule(f"{sizes} plan_file", flags=size)
    def both_ways(args: Namespace) -> Iterator[str]:
        each, given = getattr(args, sizes), getattr(args, size)
        if args.plan_file is None and each is not None and given != 1 and set(each) != {given}:
            yield (
                f"{flag_of(size)} {given} contradicts {flag_of(sizes)} "
                f"{' '.join(map(str, each))}; remove the former"
            )

    return both_ways


@rule(
    "hetero_pipeline hetero_pipeline_sizes hetero_plan plan_file",
    sets="pipeline_model_parallel_size",
)
def _pipeline_size(args: Namespace) -> Verdict:
    """--pipeline-model-parallel-size 1 is a script's default and contradicts nothing."""
    name, given = "pipeline_model_parallel_size", args.pipeline_model_parallel_size
    if not args.hetero_pipeline:
        return {name: given or 1}
    stages = sum(args.hetero_pipeline_sizes)
    if given not in (None, 1, stages):
        if args.plan_file is not None:
            yield _contradiction(args, name, given, [stages])
        else:
            yield (
                f"--hetero-pipeline-sizes adds up to {counted(stages, 'stage')}, but "
                f"--pipeline-model-parallel-size is {given}; change one, or remove the latter"
            )
    return {name: stages}


@rule("pipeline_model_parallel_size", sets="transformer_pipeline_model_parallel_size")
def _other_pipeline_size(args: Namespace) -> Values:
    """Megatron's other name of it, which its helpers read."""
    return {"transformer_pipeline_model_parallel_size": args.pipeline_model_parallel_size}


@rule(
    "hetero_pipeline hetero_pipeline_sizes hetero_tensor_sizes hetero_context_sizes",
    flags="tensor_model_parallel_size context_parallel_size",
    sets="tensor_sizes context_sizes",
)
def _sizes_of_meshes(args: Namespace) -> Values:
    """Of each mesh; one size without a pipeline across vendors."""
    meshes = len(args.hetero_pipeline_sizes) if args.hetero_pipeline else 1
    return {
        "tensor_sizes": args.hetero_tensor_sizes or [args.tensor_model_parallel_size] * meshes,
        "context_sizes": args.hetero_context_sizes or [args.context_parallel_size] * meshes,
    }


@rule(
    "hetero_pipeline hetero_vendors hetero_pipeline_sizes hetero_tensor_sizes hetero_data_sizes "
    "pipeline_model_parallel_size tensor_sizes context_sizes world_size",
    sets="meshes tensor_model_parallel_size context_parallel_size data_parallel_size",
)
def _sizes(args: Namespace) -> Verdict:
    """The shapes of the meshes. If they differ, all sizes are those of the widest mesh."""
    stages = [args.pipeline_model_parallel_size]
    if args.hetero_pipeline:
        stages = args.hetero_pipeline_sizes
    tensor, context, data = args.tensor_sizes, args.context_sizes, args.hetero_data_sizes
    if data is None:
        replica = sum(s * t * c for s, t, c in zip(stages, tensor, context, strict=True))
        if args.world_size % replica:
            yield (
                f"the world size {args.world_size} must be a multiple of {_replica_text(args)}; "
                "start another number of processes, or change the sizes"
            )
            return {}
        data = [args.world_size // replica] * len(stages)
    widest = data.index(max(data))
    meshes = None
    if args.hetero_pipeline:
        shapes = zip(args.hetero_vendors, stages, tensor, context, data, strict=True)
        meshes = tuple(Mesh(v, s, tensor=t, context=c, data=d) for v, s, t, c, d in shapes)
        yield from world_size_problems(meshes, args.world_size)
    return {
        "meshes": meshes,
        "tensor_model_parallel_size": tensor[widest],
        "context_parallel_size": context[widest],
        "data_parallel_size": data[widest],
    }


def _replica_text(args: Namespace) -> str:
    tensor, context = args.tensor_sizes, args.context_sizes
    has_context = set(context) != {1}
    if len({*zip(tensor, context, strict=True)}) == 1:
        return (
            f"the tensor-parallel size {tensor[0]} times "
            f"{f'the context-parallel size {context[0]} times ' * has_context}"
            f"the pipeline size {args.pipeline_model_parallel_size}"
        )
    meshes = zip(args.hetero_pipeline_sizes, tensor, context, strict=True)
    terms = " + ".join(f"{s} x {t}{f' x {c}' * has_context}" for s, t, c in meshes)
    kinds = "tensor- and context-parallel" if has_context else "tensor-parallel"
    return f"the stages times {kinds} sizes of all meshes, {terms}"


@rule(
    "data_parallel_size tensor_model_parallel_size context_parallel_size "
    "pipeline_model_parallel_size hetero_data_parallel world_size"
)
def _number_of_replicas(args: Namespace) -> Iterator[str]:
    replicas = sum(count for _, count in args.hetero_data_parallel or ())
    if replicas and replicas != args.data_parallel_size:
        size = args.tensor_model_parallel_size * args.context_parallel_size
        size *= args.pipeline_model_parallel_size
        yield (
            f"--hetero-data-parallel gives {counted(replicas, 'replica')} of "
            f"{counted(size, 'rank')} each, {replicas * size} in all, but {args.world_size} were "
            "started; change the number of processes, the replicas, or the tensor-parallel, "
            "context-parallel or pipeline size"
        )


@rule(
    "meshes data_parallel_size hetero_data_parallel hetero_data_shares world_size",
    sets="data_shares",
)
def _data_shares(args: Namespace) -> Values:
    """The ratio of the replicas' micro-batches, in smallest whole numbers."""
    if args.meshes is not None and max(mesh.data for mesh in args.meshes) > args.world_size:
        return {}  # more replicas than ranks
    if args.hetero_data_parallel is None:
        return {"data_shares": (1,) * args.data_parallel_size}
    counts = [count for _, count in args.hetero_data_parallel]
    if sum(counts) != args.data_parallel_size:
        return {}
    shares = args.hetero_data_shares or (1,) * len(counts)
    divisor = math.gcd(*shares)
    return {
        "data_shares": tuple(
            share // divisor
            for share, count in zip(shares, counts, strict=True)
            for _ in range(count)
        )
    }


_DIVIDED = "num_attention_heads num_query_groups group_query_attention ffn_hidden_size seq_length"


def sequence_parallel_of(args: Namespace) -> list[bool | None]:
    """Of each mesh: a plan file may give it, and the flag does elsewhere."""
    own = [mesh.sequence_parallel for mesh in _meshes_of(args.plan_file)]
    own = own or [None] * len(args.tensor_sizes)
    return [args.sequence_parallel if each is None else each for each in own]


def names_of_sizes(args: Namespace, flag: str, kind: str) -> list[str]:
    """What errors call the sizes of the meshes, or the one size of a flag."""
    if not args.hetero_pipeline or getattr(args, f"hetero_{kind}_sizes") is None:
        return [flag]
    return [f"mesh {i}'s ({v}) {kind}-parallel size" for i, v in enumerate(args.hetero_vendors)]


@rule(
    "hetero_pipeline tensor_sizes hetero_tensor_sizes hetero_vendors plan_file typed_flags",
    known=f"{_DIVIDED} sequence_parallel",
)
def _split_of_model(args: Namespace) -> Iterator[str]:
    """The tensor-parallel sizes must divide the model."""
    sizes = args.tensor_sizes
    names = names_of_sizes(args, "--tensor-model-parallel-size", "tensor")
    width = "the MLP's size that follows from --hidden-size,"
    if "--ffn-hidden-size" in args.typed_flags:
        width = "--ffn-hidden-size"
    counts = {
        "--num-attention-heads": args.num_attention_heads,
        "--num-query-groups": args.num_query_groups if args.group_query_attention else None,
        width: args.ffn_hidden_size,
    }
    for name, size, is_parallel in zip(names, sizes, sequence_parallel_of(args), strict=False):
        divided = dict(counts)
        if is_parallel:
            divided["with sequence parallelism, --seq-length"] = args.seq_length
        yield from tensor_problems(
            {flag: count for flag, count in divided.items() if count}, size, name=name
        )


@rule(
    "hetero_pipeline context_sizes hetero_context_sizes tensor_sizes hetero_vendors plan_file "
    "cp_comm_type",
    known="num_attention_heads num_query_groups group_query_attention seq_length sequence_parallel",
)
def _split_of_sequences(args: Namespace) -> Iterator[str]:
    """The context-parallel sizes must divide the sequence and, for a2a, the heads."""
    names = names_of_sizes(args, "--context-parallel-size", "context")
    parallel = sequence_parallel_of(args)
    shapes = zip(names, args.context_sizes, args.tensor_sizes, parallel, strict=False)
    for name, context, tensor, is_parallel in shapes:
        if args.seq_length:
            parts = tensor if is_parallel else 1
            yield from context_problems(args.seq_length, context, parts, name=name)
        if "a2a" not in args.cp_comm_type:
            continue
        heads = args.num_attention_heads
        groups = args.num_query_groups if args.group_query_attention else heads
        for flag, count in (("--num-attention-heads", heads), ("--num-query-groups", groups)):
            if count and count % tensor == 0 and count // tensor % context:
                yield (
                    f"--cp-comm-type a2a gives each of {counted(context, 'rank')} ({name}) whole "
                    f"heads, and {flag} {count}"
                    + (f" over {tensor} tensor-parallel ranks" if tensor > 1 else "")
                    + " cannot be shared by them; use --cp-comm-type p2p"
                )
                break


@rule(
    "context_sizes num_layers hierarchical_context_parallel_sizes typed_flags", sets="cp_comm_type"
)
def _context_comm(args: Namespace) -> Verdict:
    """The type of every layer: all of them, or one."""
    types, levels = args.cp_comm_type, args.hierarchical_context_parallel_sizes
    has_context = set(args.context_sizes) != {1}
    if len(types) not in (1, args.num_layers):
        yield (
            f"--cp-comm-type has {counted(len(types), 'value')} and --num-layers is "
            f"{args.num_layers}; give one for all layers, or one for each"
        )
        return {}
    if levels and has_context and set(args.context_sizes) != {math.prod(levels)}:
        yield (
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, levels))} multiply to "
            f"{math.prod(levels)}, and the context-parallel size is "
            f"{' '.join(map(str, sorted(set(args.context_sizes))))}; make them equal, or remove "
            "the levels"
        )
    if not has_context:
        for flag in ("--cp-comm-type", "--hierarchical-context-parallel-sizes"):
            if flag in args.typed_flags:
                yield Note(f"{flag}: it needs a context-parallel size above 1")
    elif levels or "a2a+p2p" in types:
        yield Note(
            "--cp-comm-type a2a+p2p and --hierarchical-context-parallel-sizes: keys and values go "
            "round one ring (p2p), the sums are the same"
        )
    return {"cp_comm_type": ["p2p" if each == "a2a+p2p" else each for each in types]}


@rule("tensor_sizes", sets="sequence_parallel")
def _sequence_parallel(args: Namespace) -> Values:
    """As in Megatron: with one rank it would change numerics and save nothing."""
    return {"sequence_parallel": args.sequence_parallel and set(args.tensor_sizes) != {1}}


@rule(
    f"pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage num_layers {_ENDS} "
    "num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout hetero_pipeline_layers "
    "hetero_plan mtp_num_layers",
    flags=_ACCOUNTED,
    sets="virtual_pipeline_model_parallel_size",
)
def _chunks(args: Namespace) -> Verdict:
    """The number of model chunks of each rank; None if the schedule is not interleaved."""
    ways = {
        "--num-layers-per-virtual-pipeline-stage": args.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
    }
    chosen = [flag for flag, value in ways.items() if value is not None]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other; keep one of them"
        return {}
    if args.pipeline_model_parallel_layout is not None:
        size = _chunks_of_layout(args)
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        size = _chunks_of_layers(args)
    else:
        size = args.num_virtual_stages_per_pipeline_rank or 1
    if size > counted_layers(args):
        yield (
            f"--num-virtual-stages-per-pipeline-rank {size} is more than there are layers; give a "
            "smaller number"
        )
        size = 1
    return {"virtual_pipeline_model_parallel_size": size if size > 1 else None}


def _chunks_of_layout(args: Namespace) -> int:
    stages = parse_layout(
        args.pipeline_model_parallel_layout,
        num_layers=args.num_layers,
        mtp_num_layers=args.mtp_num_layers,
    )
    if len(stages) % args.pipeline_model_parallel_size:
        raise UserError(
            f"--pipeline-model-parallel-layout has {counted(len(stages), 'stage')}, which is no "
            f"multiple of --pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    return len(stages) // args.pipeline_model_parallel_size


def _chunks_of_layers(args: Namespace) -> int:
    uneven = (*_ENDS.split(), "hetero_pipeline_layers", "hetero_plan")
    for name in uneven:
        if getattr(args, name) is not None:
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage cannot go with {flag_of(name)}; use "
                "--num-virtual-stages-per-pipeline-rank"
            )
    chunk = args.num_layers_per_virtual_pipeline_stage
    unit = args.pipeline_model_parallel_size * chunk
    layers = counted_layers(args)
    if layers % unit:
        raise UserError(
            f"--num-layers {args.num_layers}{_extra_layers_text(args)} must be a multiple of "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} times "
            f"--num-layers-per-virtual-pipeline-stage {chunk}"
        )
    return layers // unit


def counted_layers(args: Namespace) -> int:
    """The layers that stages share; the embedding and the loss count as one each if asked for."""
    return int(
        args.num_layers
        + args.account_for_embedding_in_pipeline_split
        + args.account_for_loss_in_pipeline_split
    )


def _extra_layers_text(args: Namespace) -> str:
    extra = counted_layers(args) - args.num_layers
    return f" and {extra} for embedding or loss" if extra else ""


LAYOUT = "--pipeline-model-parallel-layout"
# E: embedding; t: transformer layer; m: MTP layer; L: output layer and loss. | ends a stage.
LETTERS = "EtmL"
# A longer layout has a mistyped number of repetitions.
LONGEST = 100_000


def parse_layout(text: str, *, num_layers: int, mtp_num_layers: int | None = None) -> list[str]:
    """The letters of each stage of a layout such as 'Et|(tt|)*3tmL'.

    It has `num_layers` t in all, and `mtp_num_layers` m directly before the L, in its stage.

    `(...)*n` repeats letters and bars, `x*n` one of them; commas are ignored. megatron-core's own
    parser would import torch. Raises UserError.
    """
    stages = _expand(text.replace(",", "")).split("|")
    letters = "".join(stages)
    for letter in letters:
        if letter not in LETTERS:
            raise UserError(
                f"{LAYOUT} {text!r} has {letter!r}; write E, t, m and L, | between stages, and "
                "(...)*n to repeat"
            )
    if not re.fullmatch("E[tm]*L", letters):
        raise UserError(f"{LAYOUT} {text!r} must have one E at its beginning and one L at its end")
    if letters.count("t") != num_layers:
        raise UserError(
            f"{LAYOUT} {text!r} has {counted(letters.count('t'), 'layer')}, but --num-layers is "
            f"{num_layers}"
        )
    predicting = mtp_num_layers or 0
    if letters.count("m") != predicting:
        raise UserError(
            f"{LAYOUT} {text!r} has {counted(letters.count('m'), 'MTP layer')}, but "
            f"--mtp-num-layers is {predicting}"
        )
    if not stages[-1].endswith("m" * predicting + "L"):
        raise UserError(
            f"{LAYOUT} {text!r} has an m elsewhere than directly before the L in the last stage: "
            "MTP layers need the output layer; move it there"
        )
    return stages


def _expand(text: str) -> str:
    """Write out repetitions."""
    for repeat in (r"\(([^()]+)\)\*([0-9]{1,6})", r"(.)\*([0-9]{1,6})"):
        length = len(text) + sum(len(m[1]) * int(m[2]) for m in re.finditer(repeat, text))
        if length > LONGEST:
            raise UserError(f"{LAYOUT} repeats a stage too often; its numbers are too large")
        text = re.sub(repeat, lambda match: match[1] * int(match[2]), text)
    return text


@rule(
    "virtual_pipeline_model_parallel_size overlap_p2p_comm_warmup_flush "
    "pipeline_model_parallel_size",
    sets="overlap_p2p_comm align_param_gather",
)
def _interleaving(args: Namespace) -> Verdict:
    if args.virtual_pipeline_model_parallel_size is None:
        if args.overlap_p2p_comm_warmup_flush:
            yield (
                "--overlap-p2p-communication-warmup-flush needs interleaving; add "
                "--num-virtual-stages-per-pipeline-rank"
            )
        # As in Megatron: only the interleaved schedule can overlap transfers.
        return {"overlap_p2p_comm": False, "align_param_gather": False}
    if args.pipeline_model_parallel_size == 1:
        yield "interleaving needs --pipeline-model-parallel-size above 1"
    # Batched transfers between two ranks are matched in the order of posting. Activations and
    # gradients would be exchanged, and megatron-core would train on wrong ones without an error.
    if not args.overlap_p2p_comm and args.pipeline_model_parallel_size == 2:
        yield (
            "interleaving over two pipeline stages with --no-overlap-p2p-communication would mix "
            "up activations and gradients; remove that flag"
        )
    if not args.overlap_p2p_comm and args.overlap_p2p_comm_warmup_flush:
        yield (
            "--overlap-p2p-communication-warmup-flush and --no-overlap-p2p-communication exclude "
            "each other; remove one of them"
        )
    return {
        "overlap_p2p_comm": args.overlap_p2p_comm,
        "align_param_gather": args.align_param_gather,
    }


_LAYER_FLAGS = "pipeline_model_parallel_layout hetero_pipeline_layers hetero_plan"


@rule(_LAYER_FLAGS, sets=_ACCOUNTED)
def _accounted(args: Namespace) -> Verdict:
    """Embedding and loss count as layers only if the layers of stages are not given."""
    accounted = {name: getattr(args, name) for name in _ACCOUNTED.split()}
    given = [name for name in _LAYER_FLAGS.split() if getattr(args, name) is not None]
    if len(given) == 1 and any(accounted.values()):
        yield Note(
            f"--account-for-embedding-in-pipeline-split and its like: {flag_of(given[0])} gives "
            "the layers"
        )
        return dict.fromkeys(accounted, False)
    return accounted


@rule(f"{_LAYER_FLAGS} {_ENDS}", flags=_ACCOUNTED)
def _ways_to_give_layers(args: Namespace) -> Iterator[str]:
    given = [flag_of(name) for name in _LAYER_FLAGS.split() if getattr(args, name) is not None]
    has_ends = any(getattr(args, name) is not None for name in _ENDS.split())
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; keep one of them"
    elif has_ends and any(getattr(args, name) for name in _ACCOUNTED.split()):
        yield (
            "--account-for-embedding-in-pipeline-split and -loss-in- cannot go with "
            "--decoder-first-pipeline-num-layers or -last-; keep one way"
        )
    elif has_ends and given:
        yield (
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers cannot "
            f"go with {given[0]}; remove them"
        )


@rule(
    f"{_LAYER_FLAGS} {_ENDS} {_ACCOUNTED} num_layers pipeline_model_parallel_size "
    "virtual_pipeline_model_parallel_size"
)
def _even_stages(args: Namespace) -> Iterator[str]:
    """Stages whose layers no flag gives must come out even."""
    sizes = [getattr(args, name) for name in _ENDS.split()]
    ends = [size for size in sizes if size is not None]
    if any(getattr(args, name) is not None for name in _LAYER_FLAGS.split()):
        return
    if ends and counted_layers(args) > args.num_layers:
        return
    stages = args.pipeline_model_parallel_size - len(ends)
    layers = counted_layers(args) - sum(ends)
    if ends and (layers < 0 or (stages <= 0 and layers) or (stages > 0 and not layers)):
        yield (
            f"{counted(sum(ends), 'layer')} in the first and last stage leave {layers} of "
            "--num-layers "
            f"{args.num_layers} for the other {counted(max(stages, 0), 'stage')}; change "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
        return
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if uneven := [size for size in ends if size % chunks]:
        yield (
            f"the {counted(uneven[0], 'layer')} of the first or last stage cannot be shared evenly "
            f"by its {counted(chunks, 'chunk')}; change --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers"
        )
    if stages > 0 and layers % (stages * chunks):
        shares = counted(stages, "pipeline stage") + (
            f" of {counted(chunks, 'chunk')}" if chunks > 1 else ""
        )
        yield (
            f"the {counted(args.num_layers - sum(ends), 'layer')}{_extra_layers_text(args)} cannot "
            f"be shared evenly by {shares}; change --num-layers, or give uneven stages with "
            "--pipeline-model-parallel-layout or --hetero-pipeline-layers"
        )


@rule("hetero_pipeline_layers virtual_pipeline_model_parallel_size pipeline_model_parallel_size")
def _number_of_layer_counts(args: Namespace) -> Iterator[str]:
    if args.hetero_pipeline_layers is None:
        return
    chunks = args.virtual_pipeline_model_parallel_size or 1
    stages = args.pipeline_model_parallel_size
    if len(args.hetero_pipeline_layers) not in (stages, stages * chunks):
        chunked = f" (or {stages * chunks}, one a chunk)" if chunks > 1 else ""
        yield (
            f"--hetero-pipeline-layers has {counted(len(args.hetero_pipeline_layers), 'number')} "
            f"and there are {counted(stages, 'pipeline stage')}; give {stages}{chunked}"
        )


@rule("overlap_param_gather use_distributed_optimizer overlap_grad_reduce")
def _overlapped_gather(args: Namespace) -> Iterator[str]:
    needed = [
        flag_of(name)
        for name in ("use_distributed_optimizer", "overlap_grad_reduce")
        if not getattr(args, name)
    ]
    if args.overlap_param_gather and needed:
        yield f"--overlap-param-gather needs {' and '.join(needed)}"


@rule("distributed_backend overlap_grad_reduce")
def _overlapped_gloo(args: Namespace) -> Iterator[str]:
    if args.distributed_backend == "gloo" and args.overlap_grad_reduce:
        yield (
            "--distributed-backend gloo reduces gradients one bucket after the other, each waited "
            "for; leave --overlap-grad-reduce out"
        )


@rule("ddp_num_buckets ddp_bucket_size")
def _buckets(args: Namespace) -> Iterator[str]:
    if args.ddp_num_buckets is not None and args.ddp_bucket_size is not None:
        yield "--ddp-num-buckets and --ddp-bucket-size exclude each other; remove one of them"


@rule("ddp_average_in_collective calculate_per_token_loss")
def _average(args: Namespace) -> Iterator[str]:
    if args.ddp_average_in_collective and args.calculate_per_token_loss:
        yield (
            "--ddp-average-in-collective and --calculate-per-token-loss exclude each other: "
            "gradients are divided by the tokens of all replicas; remove one of them"
        )


@rule(
    "hetero_pipeline pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "overlap_grad_reduce gradient_accumulation_fusion",
    sets="delay_wgrad_compute",
)
def _delay(args: Namespace) -> Verdict:
    """Weight gradients can wait where a stage of 1F1B hands on the gradient of its input."""
    if not args.delay_wgrad_compute:
        return {"delay_wgrad_compute": False}
    if not args.hetero_pipeline or args.pipeline_model_parallel_size == 1:
        # megatron-core's own pipeline has a place for it with mixtures of experts alone, and one
        # stage hands on no gradient after which what waits would be computed.
        needed = "a second pipeline stage" if args.hetero_pipeline else "--hetero-pipeline"
        yield Note(f"--delay-wgrad-compute: it needs {needed}")
        return {"delay_wgrad_compute": False}
    against = {
        "interleaving, which hides transfers by itself,": args.virtual_pipeline_model_parallel_size,
        "--overlap-grad-reduce, which reduces gradients during backward,": args.overlap_grad_reduce,
        "--no-gradient-accumulation-fusion, without whose products nothing can wait,": (
            not args.gradient_accumulation_fusion
        ),
    }
    for other, is_asked_for in against.items():
        if is_asked_for:
            yield f"--delay-wgrad-compute and {other} exclude each other; remove one of them"
    return {"delay_wgrad_compute": True}


@rule("profile profile_ranks world_size")
def _profiled_ranks(args: Namespace) -> Iterator[str]:
    absent = [rank for rank in args.profile_ranks if rank >= args.world_size]
    if args.profile and absent:
        yield f"--profile-ranks {absent[0]} is none of the run's {counted(args.world_size, 'rank')}"


PARALLEL_RULES = (
    _without_pipeline,
    _replicas,
    _shares,
    _order_of_measured_shares,
    _interleaving_of_measured_shares,
    _ring,
    _plan_and_shorthand,
    _plan_file,
    _layers_of_plan,
    _optimizer_of_plan,
    _engine_of_plan,
    _sizes_of_plan,
    _needed("hetero_vendors"),
    _needed("hetero_pipeline_sizes"),
    _vendors_and_sizes,
    _values_of_meshes("hetero_tensor_sizes", "tensor"),
    _values_of_meshes("hetero_context_sizes", "context"),
    _values_of_meshes("hetero_data_sizes", "data"),
    _values_of_meshes("hetero_expert_sizes", "experts"),
    _values_of_meshes("hetero_recompute", "recompute"),
    _layers_of_meshes,
    _sum_of_layers,
    _both_ways("tensor_model_parallel_size", "hetero_tensor_sizes"),
    _both_ways("context_parallel_size", "hetero_context_sizes"),
    _both_ways("expert_model_parallel_size", "hetero_expert_sizes"),
    _pipeline_size,
    _other_pipeline_size,
    _sizes_of_meshes,
    _sizes,
    _number_of_replicas,
    _data_shares,
    _split_of_model,
    _split_of_sequences,
    _context_comm,
    _sequence_parallel,
    _chunks,
    _interleaving,
    _accounted,
    _ways_to_give_layers,
    _even_stages,
    _number_of_layer_counts,
    _overlapped_gather,
    _overlapped_gloo,
    _buckets,
    _average,
    _delay,
    _profiled_ranks,
)
