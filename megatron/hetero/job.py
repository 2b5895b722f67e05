"""The context of a run on one rank: arguments, plan, groups, links, data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.observe.collect import Collector
from hetero.pipeline.groups import Groups
from hetero.pipeline.links import PipelineLinks
from hetero.plan import Coordinate, Plan
from hetero.startup.identity import RankIdentity
from hetero.startup.liveness import Liveness
from megatron.hetero.checkpoint.find_checkpoint import FoundCheckpoint, NoCheckpoint
from megatron.hetero.checkpoint.lock import SaveLock
from megatron.hetero.data import Datasets
from megatron.hetero.optimizer import RankStatistics
from megatron.hetero.output_folders import Outputs


@dataclass
class Job:
    """What `Initializer` sets up before the model is built."""

    args: argparse.Namespace
    plan: Plan
    coordinate: Coordinate
    device: torch.device
    identities: list[RankIdentity]
    groups: Groups
    links: PipelineLinks | None
    statistics: RankStatistics
    datasets: Datasets
    checkpoint: FoundCheckpoint | NoCheckpoint
    lock: SaveLock | None
    """The lock on --save; rank 0 only."""
    outputs: Outputs
    vendor_backend: str
    run_id: str
    """Of this launch, equal on all ranks; no secret."""
    liveness: Liveness | None
    collector: Collector | None = None
    """The records of all ranks; on rank 0."""

    @property
    def rank(self) -> int:
        return self.coordinate.rank

    @property
    def simulated(self) -> bool:
        return any(identity.simulated for identity in self.identities)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate.stage == self.plan.stages - 1

    def check_links(self) -> None:
        """Raise LinkError if a link or cross-vendor collective of this step failed."""
        if self.links is not None:
            self.links.check()
        self.groups.check()

    def close(self) -> None:
        """Close links and groups after a barrier, as other ranks may still use them. Collective."""
        self.statistics.gather([0.0])
        if self.liveness is not None:
            self.liveness.leave()
        if self.links is not None:
            self.links.close()
        dist.destroy_process_group()
