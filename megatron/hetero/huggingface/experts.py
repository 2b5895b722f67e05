"""Mixtures of experts in a config.json and in our arguments. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hetero.text import counted
from megatron.hetero.huggingface.config_reader import ConfigReader
from megatron.hetero.huggingface.families import Experts, Family

_UNUSED: Mapping[str, Any] = {
    "moe_shared_expert_gate": False,
    "moe_z_loss_coeff": None,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_force_load_balancing": False,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_token_drop_policy": "probs",
}
"""Arguments that no config.json has a key for, as they are by default."""
_FIRST_DENSE = "first_k_dense_replace"
_CHOSEN = "num_experts_per_tok"


def expert_args(config: ConfigReader) -> dict[str, Any]:
    """The arguments of a mixture of experts; none for a dense model."""
    experts = config.family.experts
    if experts is None:
        return {}
    count, chosen = config.size(*experts.counts), config.size(_CHOSEN)
    if chosen > count and config.has_sizes(experts.counts[0], _CHOSEN):
        config.problems.append(f"num_experts_per_tok {chosen} of {counted(count, 'expert')}")
    width = config.size(experts.width)
    return {
        "num_experts": count,
        "moe_layer_freq": _pattern(config, experts),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": (
            config.size("n_shared_experts") * width if experts.shared else None
        ),
        "moe_router_topk": chosen,
        "moe_router_score_function": experts.scores,
        "moe_router_pre_softmax": not _is_normalized(config, experts, chosen),
        "moe_router_dtype": experts.router_dtype,
        "moe_router_enable_expert_bias": experts.bias,
        **_groups(config, experts, count, chosen),
        "moe_router_topk_scaling_factor": _scaling_factor(config, experts),
        **_balancing(config, experts),
        **_UNUSED,
    }


def _pattern(config: ConfigReader, experts: Experts) -> int | list[int]:
    """Which layers have experts, as of --moe-layer-freq."""
    layers = config.size("num_hidden_layers")
    dense: set[int] = set()
    if experts.dense_layers == "mlp_only_layers":
        step = config.size("decoder_sparse_step")
        dense = {layer for layer in range(layers) if (layer + 1) % step}
        dense |= config.layers("mlp_only_layers")
    elif experts.dense_layers is not None:
        dense = set(range(config.size(experts.dense_layers, minimum=0)))
    pattern = [int(layer not in dense) for layer in range(layers)]
    of_layers = ("num_hidden_layers", experts.dense_layers or "", "decoder_sparse_step")
    if not any(pattern) and config.has_sizes(*of_layers):
        config.problems.append(
            f"no layer with experts, because of its {experts.dense_layers}; only a model with at "
            "least one can be converted"
        )
    return 1 if all(pattern) else pattern


def _is_normalized(config: ConfigReader, experts: Experts, chosen: int) -> bool:
    """Whether the scores of a token's experts add up to 1. A sigmoid's are not in a softmax."""
    key = "norm_topk_prob"
    normalized = bool(config.value(key)) if experts.normalized is None else experts.normalized
    if experts.scores == "sigmoid":
        # megatron-core normalizes several and leaves a single one as it is.
        if config.has_sizes(_CHOSEN):
            config.require(key, bool(config.value(key)), chosen > 1)
        return True
    if experts.normalized is False:
        config.require(key, bool(config.value(key)), False)
    if normalized and chosen == 1 and config.has_sizes(_CHOSEN):
        config.problems.append(
            "num_experts_per_tok 1 with a score that is normalized to 1, which has no gradient; "
            "only several, or a score that is not normalized, can be converted"
        )
    return normalized


def _groups(config: ConfigReader, experts: Experts, count: int, chosen: int) -> dict[str, Any]:
    """The groups of experts, of which a token has some. All of them are none."""
    none = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if not experts.of_a_group:
        return none
    if experts.methods:
        method = config.value("topk_method")
        if method not in experts.methods:
            config.problems.append(
                f"topk_method {method!r}, for which this program has no flag; only "
                f"{' and '.join(map(repr, experts.methods))} can be converted"
            )
        if method != experts.methods[-1]:
            return none
    groups, best = config.size("n_group"), config.size("topk_group")
    if not config.has_sizes("n_group", "topk_group", experts.counts[0], _CHOSEN):
        return none
    if count % groups or best > groups:
        config.problems.append(
            f"{counted(count, 'expert')} in {counted(groups, 'group')}, of which {best} are chosen"
        )
    elif best < groups and not _rates_groups_alike(chosen, best, experts):
        config.problems.append(
            f"num_experts_per_tok {chosen} and topk_group {best}: it rates a group by its best "
            f"{counted(experts.of_a_group, 'expert')}, and this program by as many as a token has "
            f"in each chosen group; only topk_group {chosen // experts.of_a_group} or all groups "
            "can be converted"
        )
    if best >= groups:
        return none
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}


def _rates_groups_alike(chosen: int, best: int, experts: Experts) -> bool:
    """Whether megatron-core adds up as many scores of a group as the family does."""
    return chosen == best * experts.of_a_group


def _scaling_factor(config: ConfigReader, experts: Experts) -> float | None:
    if not experts.scaled:
        return None
    factor = config.number("routed_scaling_factor", 1.0, above_zero=True)
    return None if factor == 1.0 else factor


def _balancing(config: ConfigReader, experts: Experts) -> dict[str, Any]:
    kind = "aux_loss"
    if experts.sequence_loss is not None and config.value(experts.sequence_loss, True):
        kind = "seq_aux_loss"
    return {
        "moe_router_load_balancing_type": [kind],
        "moe_aux_loss_coeff": [config.number(experts.loss, 0.0)],
    }


def expert_keys(args: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys of config.json of a mixture of experts that `foreign_expert_args` allows."""
    experts = family.experts
    if experts is None:
        return {}
    width, chosen = expert_width(args), args["moe_router_topk"]
    dense = _dense_layers(args)
    keys = {
        experts.counts[0]: args["num_experts"],
        experts.width: width,
        "num_experts_per_tok": chosen,
    }
    if experts.dense_layers == "mlp_only_layers":
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    elif experts.dense_layers is not None:
        keys[experts.dense_layers] = len(dense)
    if experts.scores == "sigmoid":
        keys["norm_topk_prob"] = chosen > 1
    elif experts.normalized is not True:
        keys["norm_topk_prob"] = not args["moe_router_pre_softmax"]
    if experts.of_a_group:
        groups, best = _effective_groups(args) or (1, 1)
        keys |= {"n_group": groups, "topk_group": best}
        if experts.methods:
            keys["topk_method"] = experts.methods[0 if groups == 1 else -1]
    if experts.shared:
        keys["n_shared_experts"] = args["moe_shared_expert_intermediate_size"] // width
    if experts.scaled:
        keys["routed_scaling_factor"] = args["moe_router_topk_scaling_factor"] or 1.0
    kind, coefficient = _told_loss(args, experts) or ("aux_loss", 0.0)
    keys[experts.loss] = coefficient
    if experts.sequence_loss is not None:
        keys[experts.sequence_loss] = kind == "seq_aux_loss"
    return keys


def foreign_expert_args(args: Mapping[str, Any], family: Family) -> Iterator[str]:
    """The arguments that make the experts others than a family's."""
    experts = family.experts
    if experts is None:
        return
    capacity = args["moe_expert_capacity_factor"]
    if capacity is not None and capacity >= 0:
        yield "moe_expert_capacity_factor"
    if "sinkhorn" in args["moe_router_load_balancing_type"]:
        yield "moe_router_load_balancing_type"
    if not _may_be_dense(args, experts):
        yield "moe_layer_freq"
    shared = args["moe_shared_expert_intermediate_size"]
    if (shared is not None) != experts.shared:
        yield "moe_shared_expert_intermediate_size"
    elif shared is not None and shared % expert_width(args):
        yield "moe_shared_expert_intermediate_size"
        yield "moe_ffn_hidden_size"
    elif shared is not None and args["moe_shared_expert_gate"]:
        yield "moe_shared_expert_gate"
    if args["moe_router_score_function"] != experts.scores:
        yield "moe_router_score_function"
    elif experts.scores == "softmax" and args["moe_router_pre_softmax"] is experts.normalized:
        yield "moe_router_pre_softmax"
    if args["moe_router_enable_expert_bias"] != experts.bias:
        yield "moe_router_enable_expert_bias"
    groups = _effective_groups(args)
    if groups and not _rates_groups_alike(args["moe_router_topk"], groups[1], experts):
        yield "moe_router_num_groups"
        yield "moe_router_group_topk"
        yield "moe_router_topk"
    if not experts.scaled and args["moe_router_topk_scaling_factor"] not in (None, 1.0):
        yield "moe_router_topk_scaling_factor"


def untold_expert_args(args: Mapping[str, Any], family: Family) -> Iterator[str]:
    """The arguments of the experts that only training uses and the family has no key for."""
    if family.experts is None:
        return
    if any(args["moe_aux_loss_coeff"]) and _told_loss(args, family.experts) is None:
        yield "moe_router_load_balancing_type"
        yield "moe_aux_loss_coeff"
    if args["moe_z_loss_coeff"]:
        yield "moe_z_loss_coeff"
    rate = "moe_router_bias_update_rate"
    if args["moe_router_enable_expert_bias"] and args[rate] != _UNUSED[rate]:
        yield rate
    if args["moe_router_force_load_balancing"]:
        yield "moe_router_force_load_balancing"


def _told_loss(args: Mapping[str, Any], experts: Experts) -> tuple[str, float] | None:
    """The auxiliary loss and its coefficient, if the family has keys for it."""
    kinds, coefficients = args["moe_router_load_balancing_type"], args["moe_aux_loss_coeff"]
    known = ("aux_loss",) if experts.sequence_loss is None else ("aux_loss", "seq_aux_loss")
    return (kinds[0], coefficients[0]) if len(kinds) == 1 and kinds[0] in known else None


def layers_with_experts(args: Mapping[str, Any]) -> frozenset[int]:
    """The layers that are mixtures of experts, counted from 0."""
    pattern, layers = args["moe_layer_freq"], range(args["num_layers"])
    if isinstance(pattern, int):
        return frozenset(layers[::pattern])
    return frozenset(layer for layer in layers if pattern[layer])


def expert_width(args: Mapping[str, Any]) -> int:
    """The inner width of an expert."""
    width: int = args["moe_ffn_hidden_size"] or args["ffn_hidden_size"]
    return width


def _dense_layers(args: Mapping[str, Any]) -> list[int]:
    return sorted(set(range(args["num_layers"])) - layers_with_experts(args))


def _may_be_dense(args: Mapping[str, Any], experts: Experts) -> bool:
    """Whether the layers without experts are some that the family's may be without."""
    dense = _dense_layers(args)
    if not dense or len(dense) == args["num_layers"]:
        return not dense
    if experts.dense_layers == _FIRST_DENSE:
        return dense == list(range(len(dense)))
    return experts.dense_layers is not None


def _effective_groups(args: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many groups of experts there are and a token has; None if it may have all."""
    groups, best = args["moe_router_num_groups"], args["moe_router_group_topk"]
    return None if best is None or groups is None or best >= groups else (groups, best)
