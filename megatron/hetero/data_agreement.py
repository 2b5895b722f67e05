"""Builds tokenizer and datasets on all ranks, and verifies that they are the same everywhere."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero.errors import UserError
from hetero.plan import Plan
from hetero.startup.exchange import JobExchanges
from megatron.hetero.checkpoint.train_state import TrainState
from megatron.hetero.data import Datasets, SplitSizes, build_datasets, needs_data
from megatron.hetero.dataset_checks import check_datasets, named_prefixes, require_same_data
from megatron.hetero.fill_in_middle import fill_in_middle
from megatron.hetero.tokenizer.build import build_tokenizer
from megatron.hetero.tokenizer.vocabulary import embedding_rows
from megatron.hetero.tokenizer.wrapper import tokenizer_digest


@dataclass(frozen=True)
class AgreedTokenizer:
    """The tokenizer of all ranks, and what of the data it fits."""

    tokenizer: Any
    empty_splits: frozenset[str]
    """Names of splits without documents."""
    digests: Mapping[str, str]
    """What the token files of each prefix hold."""


def agree_on_tokenizer(
    args: argparse.Namespace, exchanges: JobExchanges, *, read_indexes: bool
) -> AgreedTokenizer:
    """Build the tokenizer and check the data files. Collective; an error on one rank ends all.

    Sets the sizes of the vocabulary. Only one rank per node should `read_indexes`; the result is
    shared with the others.
    """
    tokenizer, payload, problem = None, {}, None
    try:
        tokenizer = build_tokenizer(args)
        args.tokenizer_vocab_size = int(tokenizer.vocab_size)
        args.tokenizer_digest = tokenizer_digest(tokenizer)
        args.tokenizer_begin = list(tokenizer.begin)
        fim = fill_in_middle(args, tokenizer)
        special = None if fim is None else fim.ids
        payload = {
            "host": socket.gethostname(),
            "tokenizer": [
                args.tokenizer_vocab_size,
                [args.tokenizer_digest, args.tokenizer_begin, special],
            ],
            "absent": [],
            "data": [],
        }
        if not args.mock_data:
            found = check_datasets(args, read_indexes=read_indexes)
            payload |= {"absent": sorted(found.empty_splits), "data": list(found.digests)}
    except UserError as error:
        problem = error
    payloads = exchanges.exchange("data files", payload=payload, error=problem)
    empty_splits = frozenset(name for record in payloads for name in record["absent"])
    require_same_data(payloads)
    # Every rank has built one, or the exchange has raised.
    assert tokenizer is not None
    args.padded_vocab_size = embedding_rows(
        args, args.tokenizer_vocab_size, base_vocab_size=tokenizer.base_vocab_size
    )
    # Each node may have its own names for the same files.
    prefixes = [prefix for prefix, _ in named_prefixes(args)]
    digests = dict(zip(prefixes, payloads[0]["data"], strict=False))
    return AgreedTokenizer(tokenizer, empty_splits, digests)


def agree_on_datasets(
    args: argparse.Namespace,
    plan: Plan,
    found: AgreedTokenizer,
    exchanges: JobExchanges,
    *,
    begun: TrainState,
    rank: int,
    local_rank: int,
) -> Datasets:
    """Build this rank's datasets, for a run that resumes from `begun`.

    Collective; an error on one rank ends all.
    """
    needed = needs_data(args, plan, plan.coordinate(rank))
    # Rank 0 writes the sample indexes, then local rank 0 of each node that does not share rank 0's
    # file system; all others read them.
    my_turn = 0 if rank == 0 else (1 if local_rank == 0 else 2)
    built: list[Any | None] = [None, None, None]
    sizes = SplitSizes(0, 0, 0)
    for turn in range(3):
        problem: UserError | None = None
        if turn == my_turn and (needed or rank == 0):
            try:
                built = build_datasets(
                    args,
                    tokenizer=found.tokenizer,
                    empty_splits=found.empty_splits,
                    digests=found.digests,
                    begun=begun,
                )
            except UserError as error:
                problem = error
        payload = {"sizes": [0 if split is None else len(split) for split in built]}
        payloads = exchanges.exchange(f"datasets {turn}", payload=payload, error=problem)
        sizes = SplitSizes(*payloads[0]["sizes"])
    train, valid, test = built
    return Datasets(
        train=train, valid=valid, test=test, sizes=sizes, empty_splits=found.empty_splits
    )
