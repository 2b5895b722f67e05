"""What does not change during a run, for the live view and for the stall watch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from hetero.observe.blame import Surroundings
from hetero.observe.state import (
    EdgeDescription,
    MeshDescription,
    RankDescription,
    RunDescription,
    StageDescription,
)
from hetero.plan import Plan
from hetero.startup.identity import RankIdentity

_PREDICTION = re.compile(r"predicted .* a step, ([\d,]+) tokens/s\s*$")
"""In the comment that `hetero plan` writes above its plan."""


def describe_run(
    args: argparse.Namespace, plan: Plan, identities: Sequence[RankIdentity]
) -> RunDescription:
    """The plan with the identities of its ranks."""
    ranks = []
    for who in identities:
        place = plan.coordinate(who.rank)
        ranks.append(
            RankDescription(
                rank=who.rank,
                host=who.host,
                vendor=who.vendor,
                device=who.device,
                is_simulated=who.simulated,
                mesh=place.mesh,
                stage=place.stage,
                data=place.data,
                context=place.context,
                tensor=place.tensor,
            )
        )
    return RunDescription(
        world_size=plan.world_size,
        ranks=tuple(ranks),
        meshes=tuple(
            MeshDescription(
                mesh=index,
                vendor=mesh.vendor,
                tensor=mesh.tensor,
                context=mesh.context,
                data=mesh.data,
                stages=tuple(block.stage for block in plan.blocks if block.mesh == index),
            )
            for index, mesh in enumerate(plan.meshes)
        ),
        stages=tuple(
            StageDescription(
                stage=block.stage,
                mesh=block.mesh,
                layers=sum(plan.layers[block.stage]),
                ranks=(block.ranks[0], block.ranks[-1]),
            )
            for block in plan.blocks
        ),
        edges=tuple(
            EdgeDescription(source=edge.source, target=edge.target, is_boundary=edge.is_boundary)
            for edge in plan.edges()
        ),
        total_iterations=args.train_iters,
        predicted_tokens_per_second=predicted_throughput(args.hetero_plan),
    )


def predicted_throughput(plan_file: str | None) -> float | None:
    """Tokens a second, from the comment that the planner has written; None if it has not."""
    if plan_file is None:
        return None
    try:
        with Path(plan_file).open(encoding="utf-8") as file:
            found = _PREDICTION.search(file.readline())
    except (OSError, ValueError):
        return None
    return float(found[1].replace(",", "")) if found else None


def rank_names(plan: Plan, identities: Sequence[RankIdentity]) -> dict[int, str]:
    """As in 'rank 5 on b (stage 1, amd)'."""
    return {
        who.rank: f"rank {who.rank} on {who.host} (stage {plan.coordinate(who.rank).stage}, "
        f"{who.vendor})"
        for who in identities
    }


def surroundings(plan: Plan, identities: Sequence[RankIdentity]) -> Surroundings:
    """Who waits for whom in which phase, where the records name no peers."""
    stages = [
        tuple(rank for block in plan.blocks_of_stage(stage) for rank in block.ranks)
        for stage in range(plan.stages)
    ]
    names = rank_names(plan, identities)
    previous, following, replicas = {}, {}, {}
    peers: dict[int, tuple[int, ...]] = {}
    for block in plan.blocks:
        peers |= {rank: tuple(r for r in block.ranks if r != rank) for rank in block.ranks}
    for who in identities:
        rank, stage = who.rank, plan.coordinate(who.rank).stage
        # With several chunks a stage, the pipeline goes round.
        is_round = plan.chunks > 1
        previous[rank] = stages[stage - 1] if stage or is_round else ()
        last = stage == plan.stages - 1
        following[rank] = () if last and not is_round else stages[(stage + 1) % plan.stages]
        replicas[rank] = stages[stage]
    return Surroundings(
        names=names,
        previous=previous,
        following=following,
        replicas=replicas,
        peers=peers,
        ends=tuple(dict.fromkeys((*stages[0], *stages[-1]))),
    )
