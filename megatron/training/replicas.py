"""Whether data-parallel ranks still hold the same weights, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hetero.errors import TrainingError
from megatron.training.core_private import gather_parameters
from megatron.training.job import Job
from megatron.training.model import StageModel

# A float64 holds whole numbers of 53 bits, and that is what ranks gather.
_PARTS, _HEX_DIGITS = 4, 12


def require_same_weights(job: Job, model: StageModel, *, iteration: int) -> None:
    """Raise TrainingError, on every rank, where replicas differ. Collective; copies all weights."""
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
    odd: list[str] = []
    for rank, row in enumerate(rows):
        place = job.plan.coordinate(rank)
        first = job.plan.rank_at(place.stage, tensor=place.tensor)
        if row != rows[first]:
            odd.append(f"rank {rank} on {job.identities[rank].host} and rank {first}")
    if odd:
        raise TrainingError(
            f"the weights of data-parallel ranks differ after iteration {iteration}: "
            f"{'; '.join(odd)}; look at the memory and the links of these hosts, and continue "
            "from the last checkpoint"
        )
