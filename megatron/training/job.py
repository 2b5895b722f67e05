"""What a rank knows of the run that it is part of."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.cluster import RankIdentity
from hetero.groups import Groups
from hetero.liveness.liveness import Liveness
from hetero.pipeline.links import PipelineLinks
from hetero.plan import Coordinate, Plan
from megatron.training.checkpoint.lock import SaveLock
from megatron.training.checkpoint.selection import Nothing, Selection
from megatron.training.data import Datasets
from megatron.training.optimizer import RankStatistics


@dataclass
class Job:
    """Everything a rank knows about the run before it builds a model."""

    args: argparse.Namespace
    plan: Plan
    coordinate: Coordinate
    device: torch.device
    identities: list[RankIdentity]
    groups: Groups
    links: PipelineLinks | None
    statistics: RankStatistics
    datasets: Datasets
    checkpoint: Selection | Nothing
    lock: SaveLock | None
    """Rank 0's hold on --save."""
    vendor_backend: str
    liveness: Liveness | None

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
        """Raise if anything that came from another vendor in this step is not to be trusted."""
        if self.links is not None:
            self.links.check()
        self.groups.check()

    def close(self) -> None:
        """Leave together: nobody's link or store goes while another rank may still use it."""
        self.statistics.gather(torch.zeros(1))
        if self.liveness is not None:
            self.liveness.leave()
        if self.links is not None:
            self.links.close()
        dist.destroy_process_group()
