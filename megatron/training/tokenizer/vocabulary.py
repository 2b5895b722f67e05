"""How many rows the embedding of a vocabulary has."""

from __future__ import annotations

import argparse
import math

from hetero.errors import AgreedError


def padded_vocab_size(vocab_size: int, *, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """The rows of the embedding: as many for every tensor-parallel rank, in a size GPUs like."""
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def embedding_rows(args: argparse.Namespace, vocab_size: int) -> int:
    """The rows of the embedding: as many as were asked for, the tokenizer's size padded elsewhere.

    A checkpoint's own rows (--use-checkpoint-args) are padded to a tensor-parallel size that does
    not divide them; --padded-vocab-size is taken as it is. Raises AgreedError for too few.
    """
    rows = args.padded_vocab_size
    # The same rows on meshes of different sizes, so that the loss is that of any plan.
    split = math.lcm(*(args.hetero_tensor_sizes or (args.tensor_model_parallel_size,)))
    if rows is None:
        return padded_vocab_size(
            vocab_size,
            make_divisible_by=args.make_vocab_size_divisible_by,
            tensor_parallel_size=split,
        )
    if args.use_checkpoint_args:
        if rows < vocab_size:
            raise AgreedError(
                f"the checkpoint has {rows} rows of vocabulary and the tokenizer {vocab_size} "
                "tokens; name the checkpoint's own with --tokenizer-type and --tokenizer-model"
            )
        return padded_vocab_size(rows, make_divisible_by=1, tensor_parallel_size=split)
    if rows < vocab_size or rows % split:
        raise AgreedError(
            f"--padded-vocab-size {rows} must be at least the tokenizer's {vocab_size} and a "
            f"multiple of {split}, of which every tensor-parallel rank has an equal part"
        )
    return int(rows)
