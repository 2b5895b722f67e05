"""Compares, bit by bit, the parameters that several ranks hold: silent corruption differs."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero.errors import CorruptionError
from megatron.hetero.optimizer import RankStatistics
from megatron.hetero.weights import EMBEDDING, TensorRank, digest

_HEX_DIGITS = 12
"""Of a digest: numbers are gathered as float64, which holds integers of up to 53 bits."""
_NONE = -1.0


@dataclass(frozen=True)
class Difference:
    """Where the ranks that hold a parameter do not hold the same. Parameters are numbers."""

    wrong: Mapping[int, float]
    """By rank that differs from most: the first parameter in which it does."""
    undecided: Mapping[tuple[int, ...], float]
    """By ranks without a majority: the first parameter in which they differ."""

    def parameter(self, rank: int) -> float | None:
        """The one to name for a rank; None for a rank that is not named."""
        parts = [key for ranks, key in self.undecided.items() if rank in ranks]
        return self.wrong.get(rank, parts[0] if parts else None)


def compare_replicas(
    tensors: Sequence[tuple[str, torch.Tensor]],
    *,
    tensor_rank: TensorRank,
    tied_copy: str | None,
    statistics: RankStatistics,
    names: Mapping[int, str],
    iteration: int,
) -> None:
    """--check-weight-hash-across-dp-replicas-interval: compare what several ranks hold.

    That is each parameter, or slice of one, of data-parallel replicas, of one vendor or of two;
    each that is not split among tensor-parallel ranks; experts that several ranks hold; and the
    copies of a tied embedding.

    Raises CorruptionError on every rank if they differ. It names the ranks that differ from most
    holders, and without a majority all holders. Collective. Copies all weights to the host.

    Args:
        tensors: this rank's weights, by global name.
        tensor_rank: which slices of them it holds.
        tied_copy: the name of the one that is a copy of the first stage's embedding, if any is.
        names: of all ranks, for the error.
        iteration: the last one, for the error.
    """
    sums = digest(tensors, tensor_rank)
    if tied_copy is not None:
        sums = {name.replace(tied_copy, EMBEDDING): text for name, text in sums.items()}
    by_number = {_number(hashlib.sha256(name.encode()).hexdigest()): name for name in sums}
    own = [value for number, name in by_number.items() for value in (number, _number(sums[name]))]
    most = int(max(row[0] for row in statistics.gather([len(own)])))
    rows = statistics.gather(own + [_NONE] * (most - len(own)))
    held = [
        {key: value for key, value in zip(row[::2], row[1::2], strict=True) if key != _NONE}
        for row in rows
    ]
    difference = find_difference(held)
    if not difference.wrong and not difference.undecided:
        return
    mine = difference.parameter(statistics.rank)
    firsts = statistics.gather_texts("" if mine is None else by_number[mine])
    raise CorruptionError(
        f"parameters that ranks have in common differ after iteration {iteration}: "
        f"{_sentence(difference, names, firsts)}; look at the memory, the GPUs and the links of "
        "these hosts, and continue from a checkpoint of before",
        ranks=sorted(difference.wrong),
    )


def _number(digest: str) -> float:
    return float(int(digest[:_HEX_DIGITS], 16))


def find_difference(held: Sequence[Mapping[float, float]]) -> Difference:
    """Compare digests, by parameter, of all ranks."""
    holders: defaultdict[float, list[int]] = defaultdict(list)
    for rank, digests in enumerate(held):
        for key in digests:
            holders[key].append(rank)
    wrong: dict[int, float] = {}
    undecided: dict[tuple[int, ...], float] = {}
    for key, ranks in holders.items():
        counts = Counter(held[rank][key] for rank in ranks)
        usual, count = counts.most_common(1)[0]
        if len(counts) > 1 and 2 * count > len(ranks):
            for rank in ranks:
                if held[rank][key] != usual:
                    wrong.setdefault(rank, key)
        elif len(counts) > 1:
            undecided.setdefault(tuple(ranks), key)
    # Where one of them is known to be wrong, that is why.
    left = {ranks: key for ranks, key in undecided.items() if not wrong.keys() & set(ranks)}
    return Difference(wrong, left)


def _sentence(difference: Difference, names: Mapping[int, str], firsts: Sequence[str]) -> str:
    told = [
        f"{names[rank]} differs from most that hold the same, first in {firsts[rank]}"
        for rank in sorted(difference.wrong)
    ]
    told += [
        f"{' and '.join(names[rank] for rank in ranks)} differ, first in {firsts[ranks[0]]}, and "
        "which of them is wrong cannot be told"
        for ranks in difference.undecided
    ]
    return "; ".join(told)
