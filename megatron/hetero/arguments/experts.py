"""Rules of mixtures of experts: the model's, the router's, and the ranks that share experts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from hetero.plan.plan import Mesh, expert_rank_problems
from hetero.text import counted
from megatron.hetero.arguments.rules import Note, Values, Verdict, flag_of, rule

_AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")

# What each flag is where it asks for nothing.
_DEFAULTS = {
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_shared_expert_overlap": False,
    "moe_grouped_gemm": False,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.0],
    "moe_z_loss_coeff": None,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_dtype": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_force_load_balancing": False,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_token_drop_policy": "probs",
    "moe_router_fusion": False,
    "expert_tensor_parallel_size": None,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
}
_WITHOUT_EFFECT = {
    "moe_permute_fusion": "tokens are put in order by plain operations, with the same result",
    "moe_router_fusion": "tokens are routed by plain operations, with the same result",
}


@rule(sets="num_experts")
def _num_experts(args: Namespace) -> Values:
    return {"num_experts": args.num_experts or None}


@rule("num_experts", flags=" ".join(_DEFAULTS))
def _idle_without_experts(args: Namespace) -> Iterator[str]:
    typed = [name for name, default in _DEFAULTS.items() if getattr(args, name) != default]
    if args.num_experts is None and typed:
        flags = ", ".join(map(flag_of, typed))
        yield Note(f"{flags}: nothing is asked for without --num-experts")


@rule("num_experts", flags=" ".join(_WITHOUT_EFFECT))
def _without_effect(args: Namespace) -> Iterator[str]:
    for name, why in _WITHOUT_EFFECT.items():
        if args.num_experts is not None and getattr(args, name):
            yield Note(f"{flag_of(name)}: {why}")


@rule("num_experts ffn_hidden_size", sets="moe_ffn_hidden_size")
def _width(args: Namespace) -> Values:
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    return {"moe_ffn_hidden_size": None if args.num_experts is None else width}


@rule("num_experts num_layers", sets="moe_layer_freq")
def _pattern(args: Namespace) -> Verdict:
    pattern = args.moe_layer_freq
    if args.num_experts is None or isinstance(pattern, int):
        return {"moe_layer_freq": pattern}
    if len(pattern) != args.num_layers:
        yield (
            f"--moe-layer-freq has {counted(len(pattern), 'number')}, but --num-layers is "
            f"{args.num_layers}; give a 0 or 1 for each layer"
        )
        return {}
    return {"moe_layer_freq": pattern}


@rule(
    "num_experts",
    sets="moe_router_load_balancing_type moe_aux_loss_coeff",
    flags="moe_router_enable_expert_bias moe_expert_capacity_factor",
)
def _balancing(args: Namespace) -> Verdict:
    types, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    given = {"moe_router_load_balancing_type": types, "moe_aux_loss_coeff": coefficients}
    if args.num_experts is None:
        return given
    if len(types) != len(coefficients):
        yield (
            f"--moe-router-load-balancing-type has {counted(len(types), 'value')} and "
            f"--moe-aux-loss-coeff {len(coefficients)}; give one coefficient for each type"
        )
        return {}
    if len(set(types)) < len(types):
        yield "--moe-router-load-balancing-type names a type twice; name each once"
        return {}
    if any(coefficients[place] for place, kind in enumerate(types) if kind == "none"):
        yield Note("--moe-aux-loss-coeff: --moe-router-load-balancing-type none has no loss")
    if "sinkhorn" in types:
        against = {
            "another type": len(types) > 1,
            "--moe-aux-loss-coeff": any(coefficients),
            "--moe-router-enable-expert-bias": args.moe_router_enable_expert_bias,
            "--moe-expert-capacity-factor": (args.moe_expert_capacity_factor or -1) >= 0,
        }
        for other, is_given in against.items():
            if is_given:
                yield (
                    f"--moe-router-load-balancing-type sinkhorn balances loads by itself; remove "
                    f"{other}"
                )
    return given


@rule("num_experts moe_router_load_balancing_type", flags=" ".join(_DEFAULTS))
def _routing(args: Namespace) -> Iterator[str]:
    experts, topk = args.num_experts, args.moe_router_topk
    if experts is None:
        return
    is_softmax = args.moe_router_score_function == "softmax"
    uses_sinkhorn = "sinkhorn" in args.moe_router_load_balancing_type
    if topk > experts:
        yield f"--moe-router-topk {topk} must be at most --num-experts {experts}"
    if topk == 1 and is_softmax and not args.moe_router_pre_softmax and not uses_sinkhorn:
        yield (
            "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax of one score is 1, "
            "which has no gradient"
        )
    if args.moe_router_enable_expert_bias and is_softmax:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; add it"
    yield from _groups(args)


def _groups(args: Namespace) -> Iterator[str]:
    experts, topk = args.num_experts, args.moe_router_topk
    groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
    if chosen is None:
        if groups is not None:
            yield Note("--moe-router-num-groups: it needs --moe-router-group-topk")
        return
    if groups is None:
        yield "--moe-router-group-topk needs --moe-router-num-groups; add it"
        return
    if experts % groups:
        yield f"--num-experts {experts} must be a multiple of --moe-router-num-groups {groups}"
    if chosen > groups:
        yield f"--moe-router-group-topk {chosen} must be at most --moe-router-num-groups {groups}"
    if topk % chosen or topk // chosen > experts // groups or topk > experts // groups * chosen:
        yield (
            f"--moe-router-topk {topk} must be a multiple of --moe-router-group-topk {chosen} that "
            f"groups of {counted(experts // groups, 'expert')} can give"
        )


@rule("num_experts", sets="moe_expert_capacity_factor")
def _capacity(args: Namespace) -> Values:
    """As in Megatron: a negative factor drops nothing."""
    factor = args.moe_expert_capacity_factor
    return {"moe_expert_capacity_factor": None if factor is None or factor < 0 else factor}


@rule(
    "num_experts moe_router_topk moe_expert_capacity_factor",
    flags="moe_pad_expert_input_to_capacity",
)
def _padding(args: Namespace) -> Iterator[str]:
    if args.num_experts is None or not args.moe_pad_expert_input_to_capacity:
        return
    factor, most = args.moe_expert_capacity_factor, args.num_experts / args.moe_router_topk
    if factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; add it"
    elif factor > most >= 1:
        yield (
            f"--moe-pad-expert-input-to-capacity with --moe-expert-capacity-factor {factor:g} "
            "would fill an expert up with more tokens than there are; the factor can be at most "
            f"--num-experts {args.num_experts} / --moe-router-topk {args.moe_router_topk}"
        )


@rule("num_experts", sets="moe_token_dispatcher_type")
def _dispatcher(args: Namespace) -> Verdict:
    kind = args.moe_token_dispatcher_type
    if args.num_experts is not None and kind == "flex":
        yield Note("--moe-token-dispatcher-type flex: tokens are exchanged by alltoall")
    return {"moe_token_dispatcher_type": "alltoall" if kind == "flex" else kind}


@rule(
    "num_experts moe_token_dispatcher_type add_bias_linear",
    flags="moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_shared_expert_gate "
    "recompute_modules",
)
def _shared_experts(args: Namespace) -> Iterator[str]:
    if args.num_experts is None:
        return
    shared = args.moe_shared_expert_intermediate_size is not None
    if shared and args.add_bias_linear:
        yield "--moe-shared-expert-intermediate-size needs --disable-bias-linear; add it"
    for name in ("moe_shared_expert_overlap", "moe_shared_expert_gate"):
        if getattr(args, name) and not shared:
            yield Note(f"{flag_of(name)}: it needs --moe-shared-expert-intermediate-size")
    if shared and args.moe_shared_expert_overlap:
        if args.moe_token_dispatcher_type != "alltoall":
            yield "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall"
        if "shared_experts" in (args.recompute_modules or ()):
            yield (
                "--moe-shared-expert-overlap and --recompute-modules shared_experts exclude each "
                "other; remove one of them"
            )


@rule(
    "num_experts hetero_pipeline hetero_pipeline_sizes hetero_expert_sizes tensor_sizes plan_file "
    "hetero_plan",
    flags="expert_model_parallel_size expert_tensor_parallel_size",
    sets="expert_sizes expert_tensor_sizes",
)
def _sizes_of_meshes(args: Namespace) -> Verdict:
    """Of each mesh; one size without a pipeline across vendors."""
    meshes: tuple[Mesh, ...] = () if args.plan_file is None else args.plan_file.meshes
    given = args.expert_model_parallel_size
    tensor = args.tensor_sizes
    experts = args.hetero_expert_sizes or [given] * len(tensor)
    if meshes:
        experts = [mesh.experts for mesh in meshes]
        if given != 1 and set(experts) != {given}:
            yield (
                f"--expert-model-parallel-size {given} contradicts the plan {args.hetero_plan}, "
                f"which says {' '.join(map(str, experts))}; leave the flag out"
            )
    if args.num_experts is None:
        if set(experts) != {1}:
            yield (
                "--expert-model-parallel-size above 1, --hetero-expert-sizes and experts: of a "
                "plan need --num-experts; add it"
            )
            return {}
        return {"expert_sizes": experts, "expert_tensor_sizes": tensor}
    own = [mesh.expert_tensor for mesh in meshes] or [None] * len(tensor)
    widths = [
        width or args.expert_tensor_parallel_size or size
        for width, size in zip(own, tensor, strict=True)
    ]
    return {"expert_sizes": experts, "expert_tensor_sizes": widths}


@rule(
    "num_experts hetero_pipeline expert_sizes expert_tensor_sizes tensor_sizes context_sizes "
    "data_parallel_size meshes plan_file hetero_data_parallel sequence_parallel "
    "moe_ffn_hidden_size",
    flags="moe_shared_expert_intermediate_size",
    sets="expert_model_parallel_size expert_tensor_parallel_size",
)
def _ranks_of_experts(args: Namespace) -> Verdict:
    """Whether the ranks of every stage can hold the experts; the sizes are the widest mesh's."""
    if args.num_experts is None:
        return {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    shapes = list(_shapes(args))
    files = () if args.plan_file is None else args.plan_file.meshes
    wrong, found = False, []
    for index, (name, mesh) in enumerate(shapes):
        own = index if args.hetero_pipeline else 0
        experts, width = args.expert_sizes[own], args.expert_tensor_sizes[own]
        parallel = files[own].sequence_parallel if files else None
        found.append((experts, width))
        for problem in _problems_of_mesh(args, mesh, experts, width, parallel, name=name):
            wrong = True
            yield problem
    if wrong:
        return {}
    data = [mesh.data for _, mesh in shapes]
    experts, width = found[data.index(max(data))]
    return {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": width}


def _shapes(args: Namespace) -> Iterator[tuple[str, Mesh]]:
    """Each mesh, and what precedes a sentence about it."""
    if args.meshes is not None:
        for index, mesh in enumerate(args.meshes):
            yield f"mesh {index} ({mesh.vendor}): ", mesh
        return
    one = Mesh("cpu", stages=1, tensor=args.tensor_sizes[0], context=args.context_sizes[0])
    for vendor, count in args.hetero_data_parallel or (("", args.data_parallel_size),):
        yield f"{vendor}: " if vendor else "", replace(one, data=count)


def _problems_of_mesh(
    args: Namespace, mesh: Mesh, experts: int, width: int, parallel: bool | None, *, name: str
) -> Iterator[str]:
    yield from expert_rank_problems(replace(mesh, experts=experts, expert_tensor=width), name=name)
    if args.num_experts % experts:
        near = [size for size in range(1, args.num_experts + 1) if args.num_experts % size == 0]
        yield (
            f"{name}--num-experts {args.num_experts} must be a multiple of the expert-parallel "
            f"size {experts}; sizes that work are {', '.join(map(str, near))}"
        )
    widths = {
        "--moe-ffn-hidden-size": (args.moe_ffn_hidden_size, "expert-tensor", width),
        "--moe-shared-expert-intermediate-size": (
            args.moe_shared_expert_intermediate_size,
            "tensor",
            mesh.tensor,
        ),
    }
    for flag, (size, kind, ranks) in widths.items():
        if size and size % ranks:
            yield (
                f"{name}{flag} {size} must be a multiple of the {kind}-parallel size {ranks}; the "
                f"nearest that is: {max(round(size / ranks), 1) * ranks}"
            )
    is_parallel = args.sequence_parallel if parallel is None else parallel
    if mesh.tensor > 1 and not is_parallel:
        yield (
            f"{name}a mixture of experts with tensor-parallel size {mesh.tensor} needs "
            "--sequence-parallel; add it"
        )


@rule("num_experts moe_router_load_balancing_type moe_aux_loss_coeff meshes hetero_data_parallel")
def _global_aux_loss(args: Namespace) -> Iterator[str]:
    """It counts the tokens of all replicas of a stage, in every forward pass."""
    types = args.moe_router_load_balancing_type
    if args.num_experts is None or "global_aux_loss" not in types:
        return
    if not args.moe_aux_loss_coeff[types.index("global_aux_loss")]:
        return
    remedy = "use seq_aux_loss"
    if args.hetero_data_parallel is not None:
        yield (
            "--moe-router-load-balancing-type global_aux_loss reduces over all replicas in every "
            f"forward pass, and --hetero-data-parallel puts them on several vendors; {remedy}"
        )
    elif len({(mesh.data, mesh.context) for mesh in args.meshes or ()}) > 1:
        yield (
            "--moe-router-load-balancing-type global_aux_loss depends on the number of replicas, "
            f"which differs between the meshes; make their sizes equal, or {remedy}"
        )


@rule("num_experts add_bias_linear expert_tensor_sizes")
def _biases(args: Namespace) -> Iterator[str]:
    """Each rank that shares an expert would add its bias."""
    is_shared = max(args.expert_tensor_sizes) > 1
    if args.num_experts is not None and args.add_bias_linear and is_shared:
        yield (
            "biases of experts need --expert-tensor-parallel-size 1: ranks that share an expert "
            "would add them several times; or add --disable-bias-linear"
        )


@rule("num_experts hetero_check_operators")
def _operator_checks(args: Namespace) -> Iterator[str]:
    if args.num_experts is not None and args.hetero_check_operators:
        yield "--hetero-check-operators does not know experts; remove it"


EXPERT_RULES = (
    _num_experts,
    _idle_without_experts,
    _without_effect,
    _width,
    _pattern,
    _balancing,
    _routing,
    _capacity,
    _padding,
    _dispatcher,
    _shared_experts,
    _sizes_of_meshes,
    _ranks_of_experts,
    _global_aux_loss,
    _biases,
    _operator_checks,
)
