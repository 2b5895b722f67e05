"""All-reduce of sparse tensors: every rank's indices and values are gathered, then added up."""

from __future__ import annotations

from collections.abc import Generator

import torch

from hetero.collectives import rows
from hetero.collectives.exchange import Exchange, Moves, Steps
from hetero.collectives.flat_memory import cut, plain
from hetero.collectives.reductions import Reduction, UnsupportedError


def all_reduce_sparse(exchange: Exchange, tensor: torch.Tensor, reduction: Reduction) -> Steps:
    """Reduce a sparse COO tensor in place. Only sums, whose order is that of the ranks."""
    if reduction.kernel != "SUM" or reduction.factor is not None:
        raise UnsupportedError(
            f"there is no reduction {reduction.name} of sparse tensors; take SUM"
        )
    own = tensor.coalesce()
    nnz = torch.tensor([own._nnz()], device=tensor.device)
    counts = (yield from _gathered(exchange, nnz)).view(-1).tolist()
    longest = max(counts)
    indices, values = own.indices(), own.values()
    missing = longest - own._nnz()
    all_indices = yield from _gathered(exchange, _padded(indices.t().contiguous(), missing))
    all_values = yield from _gathered(exchange, _padded(values, missing))
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


def _gathered(exchange: Exchange, tensor: torch.Tensor) -> Generator[Moves, None, torch.Tensor]:
    """Every rank's tensor, all of one shape, along a new first dimension."""
    size = exchange.layout.size
    table = tensor.new_empty((size, *tensor.shape))
    pieces = cut(table, [tensor.nbytes] * size)
    yield from rows.all_gather(exchange, pieces, plain(tensor), table=table)
    return table
