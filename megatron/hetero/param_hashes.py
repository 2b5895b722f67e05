"""--check-weight-hash-across-dp-replicas-interval: compares weights of data-parallel replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hetero.errors import HeteroError
from megatron.hetero.core_private import gather_parameters
from megatron.hetero.job import Job
from megatron.hetero.model import StageModel

# Hashes are gathered as float64, which represents integers of up to 53 bits: 12 hex digits each.
_PARTS, _HEX_DIGITS = 4, 12


def check_param_hashes_across_dp_replicas(job: Job, model: StageModel, *, iteration: int) -> None:
    """Raise HeteroError on every rank if replicas differ in any bit.

    Collective. Copies all weights to the host.
    """
    gather_parameters(model.chunks)
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        whole = parameter.detach().cpu().contiguous().view(torch.uint8)
        digest.update(whole.numpy().tobytes())
    text = digest.hexdigest()
    parts = [int(text[i * _HEX_DIGITS :][:_HEX_DIGITS], 16) for i in range(_PARTS)]
    rows = job.statistics.gather(torch.tensor(parts, dtype=torch.float64))
    _compare(job, rows, iteration=iteration)


def _compare(job: Job, rows: Sequence[Sequence[float]], *, iteration: int) -> None:
    mismatches: list[str] = []
    for rank, row in enumerate(rows):
        coordinate = job.plan.coordinate(rank)
        first = job.plan.rank_at(coordinate.stage, tensor=coordinate.tensor)
        if row != rows[first]:
            mismatches.append(f"rank {rank} on {job.identities[rank].host} and rank {first}")
    if mismatches:
        raise HeteroError(
            f"the weights of data-parallel ranks differ after iteration {iteration}: "
            f"{'; '.join(mismatches)}; look at the memory and the links of these hosts, and "
            "continue from the last checkpoint",
            known_to_all=True,
        )
