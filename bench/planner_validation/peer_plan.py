"""A plan of another planner, and what it takes in this project's simulator.

Others may plan what a plan file here cannot say: stages that mix kinds of GPUs, stages without a
layer, a batch that does not divide. Such a plan is charged by the same costs, and said to be one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetero.planner.cluster_shape import Cluster
from hetero.planner.prediction import simulate_pipelines
from hetero.planner.search_space import Problem
from hetero.planner.stage_shape import StageShape
from hetero.planner.step_costs import CostModel
from hetero.text import counted


@dataclass(frozen=True)
class Replica:
    """One of a stage's data-parallel replicas."""

    kind: str
    tensor: int


@dataclass(frozen=True)
class PeerStage:
    layers: int
    """Decoder layers; the embedding and the output layer count apart."""
    replicas: tuple[Replica, ...]
    micro_batch: int


@dataclass(frozen=True)
class PeerPlan:
    """Embedding on the first stage, output layer on the last."""

    stages: tuple[PeerStage, ...]

    def __str__(self) -> str:
        return "; ".join(map(self._stage_text, self._runs()))

    def _runs(self) -> Iterator[tuple[int, PeerStage]]:
        """Stages alike one after the other, and how many."""
        number = 0
        while number < len(self.stages):
            alike = 1
            while self.stages[number : number + alike + 1] == (self.stages[number],) * (alike + 1):
                alike += 1
            yield alike, self.stages[number]
            number += alike

    @staticmethod
    def _stage_text(run: tuple[int, PeerStage]) -> str:
        count, stage = run
        held = dict.fromkeys(stage.replicas)
        each = " + ".join(
            f"{one.kind} TP {one.tensor} x DP {stage.replicas.count(one)}" for one in held
        )
        times = f"{count} stages of " if count > 1 else ""
        return f"{times}{counted(stage.layers, 'layer')} on {each} (batch {stage.micro_batch})"

    def unsupported_reason(self, samples: int) -> str:
        """Why a plan file here cannot say this plan; empty where it can."""
        if any(stage.layers < 1 for stage in self.stages):
            return "a stage without layers"
        if any(len(set(stage.replicas)) > 1 for stage in self.stages):
            return "a stage of unlike GPUs"
        first = self.stages[0]
        if samples % (first.micro_batch * len(first.replicas)):
            return "unequal numbers of micro-batches"
        return ""


def seconds_of(plan: PeerPlan, problem: Problem) -> tuple[float, bool]:
    """A step of the plan, and whether all its stages fit into their memory.

    Where the batch does not divide, the step lasts as long as the replicas that take one more.
    """
    pipelines = _placed(plan, problem.cluster)
    first = plan.stages[0]
    count = math.ceil(problem.space.global_batch / (first.micro_batch * len(first.replicas)))
    dp_groups = [_merged(stages) for stages in zip(*pipelines, strict=True)]
    cost_model = CostModel(problem.model, problem.cluster, problem.profile, problem.options)
    costs = cost_model.step_costs(pipelines, [count] * len(pipelines), dp_groups)
    fits = all(
        memory.peak <= problem.cluster.kind(stage.kind).accelerator.memory_gib * 2**30
        for pipeline, memories in zip(pipelines, costs.memory, strict=True)
        for stage, memory in zip(pipeline, memories, strict=True)
    )
    return simulate_pipelines(costs)[1], fits


def _placed(plan: PeerPlan, cluster: Cluster) -> tuple[tuple[StageShape, ...], ...]:
    """The pipelines that differ, and where they stand: each kind's GPUs are taken in turn.

    The n-th replicas of all stages are a pipeline. Where stages have different numbers of them,
    they are all of one kind, and make one.
    """
    taken = {kind.name: 0 for kind in cluster.kinds}
    sizes = {len(stage.replicas) for stage in plan.stages}
    columns = (
        [(stage.replicas[0],) for stage in plan.stages]
        if len(sizes) > 1
        else [stage.replicas for stage in plan.stages]
    )
    pipelines = list(zip(*columns, strict=True))
    last = len(plan.stages) - 1
    placed = []
    for pipeline in dict.fromkeys(pipelines):
        stages = []
        for number, (one, stage) in enumerate(zip(pipeline, plan.stages, strict=True)):
            data = len(stage.replicas) if len(sizes) > 1 else pipelines.count(pipeline)
            first_gpu = -(-taken[one.kind] // one.tensor) * one.tensor
            taken[one.kind] = first_gpu + one.tensor * data
            stages.append(
                StageShape(
                    kind=one.kind,
                    first_gpu=first_gpu,
                    layers=(stage.layers,),
                    has_embedding=number == 0,
                    has_head=number == last,
                    tensor=one.tensor,
                    data=data,
                    micro_batch=stage.micro_batch,
                )
            )
        placed.append(tuple(stages))
    return tuple(placed)


def _merged(held: tuple[StageShape, ...]) -> list[StageShape]:
    """Holders of a stage that differ in nothing but their number reduce as one."""
    merged: dict[tuple[str, int], StageShape] = {}
    for stage in held:
        key = (stage.kind, stage.tensor)
        known = merged.get(key)
        merged[key] = replace(known, data=known.data + stage.data) if known else stage
    return list(merged.values())
