"""What all ranks have to agree on before they train: one tokenizer, and the same data."""

from __future__ import annotations

import argparse
from typing import Any

from hetero.agreement import Agreement
from hetero.errors import UserError
from hetero.plan import Plan
from megatron.training.data import Datasets, Splits, build_datasets, needs_data
from megatron.training.dataset_checks import check_datasets, require_same_text
from megatron.training.fill_in_middle import fill_in_middle
from megatron.training.tokenizer.build import build_tokenizer
from megatron.training.tokenizer.vocabulary import embedding_rows
from megatron.training.tokenizer.wrapper import tokenizer_digest


def agree_on_data(
    args: argparse.Namespace, plan: Plan, agreement: Agreement, *, rank: int, local_rank: int
) -> Datasets:
    """Build the tokenizer and this rank's datasets, in two steps on all ranks or on none."""
    tokenizer, absent = _agree_on_tokenizer(args, agreement, whole=local_rank == 0)
    needed = needs_data(args, plan, plan.coordinate(rank))
    # Indices are written once: by rank 0, then by one rank of each node that does not see rank
    # 0's files, then read by all.
    my_turn = 0 if rank == 0 else (1 if local_rank == 0 else 2)
    built: list[Any | None] = [None, None, None]
    sizes = Splits(0, 0, 0)
    for turn in range(3):
        problem: UserError | None = None
        if turn == my_turn and (needed or rank == 0):
            try:
                built = build_datasets(args, tokenizer=tokenizer, absent=absent)
            except UserError as error:
                problem = error
        payload = {"sizes": [0 if split is None else len(split) for split in built]}
        payloads = agreement.exchange(f"datasets {turn}", payload=payload, error=problem)
        sizes = Splits(*payloads[0]["sizes"])
    train, valid, test = built
    return Datasets(train=train, valid=valid, test=test, sizes=sizes, absent=absent)


def _agree_on_tokenizer(
    args: argparse.Namespace, agreement: Agreement, *, whole: bool
) -> tuple[Any, frozenset[str]]:
    """Read the tokenizer and check the data files of this node.

    One rank of a node reads the `whole` indexes, and tells the others which splits are empty.
    """
    tokenizer, payload, problem = None, {}, None
    try:
        tokenizer = build_tokenizer(args)
        args.tokenizer_vocab_size = int(tokenizer.vocab_size)
        args.tokenizer_digest = tokenizer_digest(tokenizer)
        reordering = fill_in_middle(args, tokenizer)
        special = None if reordering is None else reordering.ids
        payload = {
            "tokenizer": [args.tokenizer_vocab_size, [args.tokenizer_digest, special]],
            "absent": [],
            "data": [],
        }
        if not args.mock_data:
            vocab_size = args.tokenizer_vocab_size
            found = check_datasets(args, vocab_size=vocab_size, whole=whole)
            payload |= {"absent": sorted(found.absent), "data": list(found.digests)}
    except UserError as error:
        problem = error
    payloads = agreement.exchange("data files", payload=payload, error=problem)
    absent = frozenset(name for record in payloads for name in record["absent"])
    require_same_text(payloads)
    args.padded_vocab_size = embedding_rows(args, args.tokenizer_vocab_size)
    return tokenizer, absent
