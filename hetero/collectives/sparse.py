"""all_reduce of sparse tensors: all-gather indices and values, then add them locally."""

from __future__ import annotations

from collections.abc import Generator

import torch

from hetero.collectives import all_gather
from hetero.collectives.memory_segments import materialize, split_segments
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule
from hetero.collectives.reductions import Reduction, UnsupportedError


def require_sum(reduction: Reduction) -> None:
    """Refuse any other reduction of sparse tensors, before anything is sent."""
    if reduction.kernel != "SUM" or reduction.factor is not None:
        raise UnsupportedError(
            f"there is no reduction {reduction.name} of sparse tensors; take SUM"
        )


def all_reduce_sparse(context: CallContext, tensor: torch.Tensor, reduction: Reduction) -> Schedule:
    """Sum a sparse COO tensor over all ranks, in the order of ranks, in place."""
    own = tensor.coalesce()
    nnz = torch.tensor([own._nnz()], device=tensor.device)
    counts = (yield from _gathered(context, nnz)).view(-1).tolist()
    longest = max(counts)
    indices, values = own.indices(), own.values()
    missing = longest - own._nnz()
    all_indices = yield from _gathered(context, _padded(indices.t().contiguous(), missing))
    all_values = yield from _gathered(context, _padded(values, missing))
    total = None
    for rank, count in enumerate(counts):
        part = torch.sparse_coo_tensor(
            all_indices[rank, :count].t(), all_values[rank, :count], tensor.shape
        )
        total = part if total is None else total + part
    assert total is not None
    result = total.coalesce()
    tensor.copy_(result / reduction.size if reduction.averages else result)


def _padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _gathered(
    context: CallContext, tensor: torch.Tensor
) -> Generator[P2PBatch, None, torch.Tensor]:
    """Every rank's tensor, all of one shape, stacked along a new first dimension."""
    size = context.layout.size
    table = tensor.new_empty((size, *tensor.shape))
    pieces = split_segments(table, [tensor.nbytes] * size)
    yield from all_gather.all_gather(context, pieces, materialize(tensor), table=table)
    return table
