"""The number of rows of the embedding."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from hetero.errors import AgreedError

if TYPE_CHECKING:
    from megatron.hetero.tokenizer.wrapper import Tokenizer


def padded_vocab_size(vocab_size: int, *, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """Pad a vocabulary as Megatron-LM does: to a multiple of both numbers' product.

    So every tensor-parallel rank has equally many rows, a number that GPU kernels are fast with.
    """
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def fits_rows(tokenizer: Tokenizer, rows: int) -> bool:
    """Whether an embedding has rows for all tokens but added ones, which need not occur.

    Models whose tokenizer got a padding token later are published without a row for it.
    """
    return tokenizer.base_vocab_size <= rows


def embedding_rows(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """The rows of the embedding: --padded-vocab-size, or the tokenizer's size, padded.

    With --use-checkpoint-args they are the checkpoint's, padded if the tensor-parallel size does
    not divide them. Raises AgreedError if there are too few, or if --padded-vocab-size cannot be
    divided.
    """
    rows = args.padded_vocab_size
    # All meshes need the same rows, because padding takes part in the loss.
    tensor_parallel_size = math.lcm(
        *(args.hetero_tensor_sizes or (args.tensor_model_parallel_size,))
    )
    if rows is None:
        return padded_vocab_size(
            tokenizer.vocab_size,
            make_divisible_by=args.make_vocab_size_divisible_by,
            tensor_parallel_size=tensor_parallel_size,
        )
    if args.use_checkpoint_args:
        if not fits_rows(tokenizer, rows):
            raise AgreedError(
                f"the checkpoint has {rows} rows of vocabulary and the tokenizer "
                f"{tokenizer.base_vocab_size} tokens; name the checkpoint's own with "
                "--tokenizer-type and --tokenizer-model"
            )
        return padded_vocab_size(
            rows, make_divisible_by=1, tensor_parallel_size=tensor_parallel_size
        )
    if not fits_rows(tokenizer, rows) or rows % tensor_parallel_size:
        raise AgreedError(
            f"--padded-vocab-size {rows} must be at least the tokenizer's "
            f"{tokenizer.base_vocab_size} and a multiple of {tensor_parallel_size}, of which every "
            "tensor-parallel rank has an equal part"
        )
    return int(rows)


def known_tokens(args: argparse.Namespace) -> int:
    """The ids that may occur in the data: those of the tokenizer for which there is a row."""
    rows = args.padded_vocab_size
    size = int(args.tokenizer_vocab_size)
    return size if rows is None else min(size, int(rows))
