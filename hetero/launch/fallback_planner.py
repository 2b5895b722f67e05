"""`--hetero-fallback auto`: the planner chooses the plan for the nodes that are left.

The cost model is that of `hetero plan` without a profile: published figures of the accelerators, or
equal speed of all where one of them is not known. Memory is what each node's driver tells.
"""

from __future__ import annotations

import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero.errors import Faults, UserError
from hetero.launch.fallback import AUTO, AUTO_FLAG, words_with_plan, words_without_layout
from hetero.launch.plan_search import Layout, Supply, supplies_text
from hetero.plan import Plan, load_plan
from hetero.planner.accelerators import built_in_accelerators, match_driver_name
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import Cluster, LinkModel, NodeKind, link_inside_node
from hetero.planner.model_shape import ModelShape, model_shape
from hetero.planner.search import search
from hetero.planner.search_space import Problem, SearchSpace, context_sizes, expert_sizes
from hetero.planner.solution import find_best_plans, with_nodes
from hetero.planner.training_options import TrainingOptions
from hetero.text import counted, size_text
from megatron.hetero.arguments import read_command_line
from megatron.hetero.arguments.batch import batch_sizes
from megatron.hetero.arguments.config_file import expand_config_files
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.tokenizer.vocabulary import padded_vocab_size

_STAND_IN = "H100-SXM"
"""Whose figures all accelerators get where one is not known."""
_RAIL_LATENCY = 15e-6
_RUNNERS_UP = 7
"""Plans besides the best, for pretrain_gpt.py to take one of."""
_MORE_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""That an error tries."""


class FallbackPlanner:
    """Chooses plans for the nodes that are left of one job. Threads: any."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: of pretrain_gpt.py. Raises UserError with all for which it cannot plan."""
        self._words = tuple(words)
        faults = Faults()
        faults.read(lambda: _require_vendors(words))
        # Of one rank: the job's own layout needs all of its ranks.
        alone = "--hetero-pipeline --hetero-vendors cpu --hetero-pipeline-sizes 1".split()
        found = faults.read(
            lambda: read_command_line([*words_without_layout(words), *alone], world_size=1)
        )
        faults.refuse()
        assert found is not None
        self._args: Namespace = found.args
        faults.sentences += _problems(self._args)
        faults.refuse()

    def plan(self, supplies: Sequence[Supply]) -> Layout:
        """The plan with the shortest step on these nodes, or on some of them. Takes seconds.

        Raises UserError where none fits, with what would make one fit.
        """
        model = self._model()
        problem = self._problem(supplies, model)
        faults: list[str] = []
        for size in self._micro_batch_sizes():
            ranked = find_best_plans(_with(problem, micro_batch=(size,)), runners_up=_RUNNERS_UP)
            for candidate in ranked.plans if ranked is not None else ():
                plan, kinds = candidate.placement.plan, candidate.placement.kinds
                text = json.dumps(plan.to_mapping()) + "\n"
                if refused := check_words(self._words, text, ranks=plan.world_size):
                    faults += refused
                    continue
                by_name = {supply.kind.name: supply.kind for supply in supplies}
                parts = tuple(
                    (by_name[name], mesh.world_size // by_name[name].processes)
                    for name, mesh in zip(kinds, plan.meshes, strict=True)
                )
                return Layout(f"{AUTO} ({_described(plan)})", text, parts)
        if faults:
            raise UserError(
                f"{AUTO_FLAG}: pretrain_gpt.py takes none of the plans for "
                f"{supplies_text(supplies)} ({faults[0]}); give a plan file"
            )
        raise UserError(self._infeasible(supplies, problem))

    def assumption(self, supplies: Sequence[Supply]) -> str:
        """Where the costs are from, for the log."""
        if _are_known(supplies):
            return "costs are computed from published figures"
        return "all ranks are taken to be equally fast"

    def _model(self) -> ModelShape:
        args = self._args
        rows = args.padded_vocab_size or args.vocab_size
        if rows is None:
            # Imports torch and the tokenizer's library, which not every launcher needs.
            from megatron.hetero.tokenizer.build import build_tokenizer

            rows = build_tokenizer(args).vocab_size
        if args.padded_vocab_size is None:
            each = args.make_vocab_size_divisible_by
            rows = padded_vocab_size(rows, make_divisible_by=each, tensor_parallel_size=1)
        return model_shape(args, vocabulary=rows)

    def _micro_batch_sizes(self) -> Iterator[int]:
        """That of the job first; smaller ones need less memory, where the loss stays the same."""
        size = self._args.micro_batch_size
        yield size
        if not self._args.eod_mask_loss or self._args.calculate_per_token_loss:
            yield from (part for part in range(size - 1, 0, -1) if size % part == 0)

    def _problem(self, supplies: Sequence[Supply], model: ModelShape) -> Problem:
        args = self._args
        options = TrainingOptions.of_flags(vars(args))
        cluster = Cluster(tuple(_node_kinds(supplies)), {})
        recompute = args.recompute_granularity or "none"
        sizes = {
            size
            for supply in supplies
            for size in range(1, supply.kind.processes + 1)
            if supply.kind.processes % size == 0
        }
        space = SearchSpace(
            global_batch=math.gcd(*batch_sizes(args)),
            tensor=tuple(sorted(sizes)),
            context=context_sizes(model.seq_length, max(sizes)),
            experts=expert_sizes(model, max(sizes)),
            micro_batch=(args.micro_batch_size,),
            recompute=tuple(dict.fromkeys((recompute, "full"))),
            replicas=False,  # plan files have none
            distributed_optimizer=bool(args.use_distributed_optimizer),
            sequence_parallel="--sequence-parallel" in args.typed_flags,
            whole_nodes=True,
        )
        profile = analytic_profile(model, cluster, element_bytes=options.activation_bytes)
        return Problem(cluster, model, profile, space, options)

    def _infeasible(self, supplies: Sequence[Supply], problem: Problem) -> str:
        where = f"{AUTO_FLAG}: no plan fits on {supplies_text(supplies)}"
        smallest = tuple(self._micro_batch_sizes())[-1]
        least = _with(problem, micro_batch=(smallest,))
        if not _has_plan(_with_memory(least, 1e9)):
            return (
                f"{where}, whatever their memory: no layout of "
                f"{counted(problem.model.layers, 'layer')} and {problem.space.global_batch} "
                "sequences a step has all ranks of a node; give a plan file, or nodes of another "
                "number of ranks"
            )
        remedies = []
        for kind in least.cluster.kinds:
            enough = (
                count
                for count in _MORE_NODES
                if _has_plan(with_nodes(least, kind, kind.nodes + count))
            )
            if (count := next(enough, None)) is not None:
                remedies.append(f"{counted(count, 'more node')} of {kind.name}")
        options, model = problem.options, problem.model
        held = model.parameters * (
            options.parameter_bytes + options.gradient_bytes + options.state_bytes
        )
        fits = " or ".join(remedies) or "a smaller model"
        return (
            f"{where}, also with full recomputation and a micro-batch of {smallest}: weights, "
            f"gradients and optimizer state take {size_text(held)}, activations come on top; "
            f"{fits} would make it fit"
        )


def check_words(words: Sequence[str], plan: str, *, ranks: int) -> list[str]:
    """What pretrain_gpt.py would say of a plan file's text in place of the layout in `words`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.yaml"
        file.write_text(plan, "utf-8")
        try:
            read_command_line(words_with_plan(words, str(file)), world_size=ranks)
        except UserError as error:
            return [sentence.replace(f"{file}", "the plan") for sentence in error.sentences]
    return []


def _require_vendors(words: Sequence[str]) -> None:
    """UserError unless the layout of a command line has several vendors."""
    parser = build_parser()
    flags, _ = expand_config_files(words, parser)
    args, _ = parser.parse_known_args(flags)
    vendors = list(args.hetero_vendors or ())
    if args.hetero_data_parallel:
        vendors += [vendor for vendor, _ in args.hetero_data_parallel]
    elif args.hetero_plan is not None:
        vendors += [mesh.vendor for mesh in load_plan(args.hetero_plan).meshes]
    if len(set(vendors)) < 2:
        who = f"all ranks are of {vendors[0]}" if vendors else "the job has one vendor"
        raise UserError(
            f"{AUTO_FLAG} is for the loss of one vendor of several, and {who}; leave it out, or "
            "give --hetero-pipeline or --hetero-data-parallel"
        )


def _problems(args: Namespace) -> Iterator[str]:
    if args.dataloader_type == "cyclic":
        yield (
            f"{AUTO_FLAG} cannot keep the order of --dataloader-type cyclic, which depends on the "
            "number of replicas; leave that out, or give a plan file with as many"
        )


def _node_kinds(supplies: Sequence[Supply]) -> Iterator[NodeKind]:
    are_known = _are_known(supplies)
    for supply in supplies:
        kind = supply.kind
        base = (match_driver_name(kind.accelerator) if are_known else None) or _STAND_IN
        accelerator = replace(
            built_in_accelerators()[base],
            name=kind.name,
            vendor=kind.vendor,
            memory_gib=supply.memory / 2**30,
        )
        yield NodeKind(
            name=kind.name,
            accelerator=accelerator,
            nodes=supply.nodes,
            gpus_per_node=kind.processes,
            rails=kind.processes,
            intra_node=link_inside_node(accelerator),
            rail=LinkModel(accelerator.nic_bandwidth, _RAIL_LATENCY),
        )


def _are_known(supplies: Sequence[Supply]) -> bool:
    names = [supply.kind.accelerator for supply in supplies]
    return all(name and match_driver_name(name) is not None for name in names)


def _with(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, space=replace(problem.space, **changes))


def _with_memory(problem: Problem, gib: float) -> Problem:
    kinds = tuple(
        replace(kind, accelerator=replace(kind.accelerator, memory_gib=gib))
        for kind in problem.cluster.kinds
    )
    return replace(problem, cluster=replace(problem.cluster, kinds=kinds))


def _has_plan(problem: Problem) -> bool:
    return bool(search(problem, num_candidates=1).candidates)


def _described(plan: Plan) -> str:
    """In a line."""
    stages: Mapping[int, Sequence[Sequence[int]]] = {
        index: [plan.layers[block.stage] for block in plan.blocks if block.mesh == index]
        for index in range(len(plan.meshes))
    }
    return "; ".join(
        f"{mesh.vendor}: layers {' '.join(str(sum(chunks)) for chunks in stages[index])}, "
        f"TP {mesh.tensor}, "
        + (f"CP {mesh.context}, " if mesh.context > 1 else "")
        + (f"EP {mesh.experts}, " if mesh.experts > 1 else "")
        + f"DP {mesh.data}, micro-batch {mesh.micro_batch_size}, recompute {mesh.recompute}"
        for index, mesh in enumerate(plan.meshes)
    )
