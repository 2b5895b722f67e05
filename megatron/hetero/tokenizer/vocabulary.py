"""The number of rows of the embedding."""

from __future__ import annotations

import argparse
import math

from hetero.errors import UserError


def padded_vocab_size(vocab_size: int, *, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """Pad a vocabulary as Megatron-LM does: to a multiple of both numbers' product.

    So every tensor-parallel rank has equally many rows, a number that GPU kernels are fast with.
    """
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def embedding_rows(
    args: argparse.Namespace, vocab_size: int, *, base_vocab_size: int | None = None
) -> int:
    """The rows of the embedding: --padded-vocab-size, or the tokenizer's size, padded.

    Only the `base_vocab_size` tokens, by default all, must have a row where the rows are given:
    added ones need not occur, as the padding token that a model's tokenizer got later.
    With --use-checkpoint-args they are the checkpoint's, padded if the tensor-parallel size does
    not divide them. Raises UserError if there are too few, or if --padded-vocab-size cannot be
    divided.
    """
    rows = args.padded_vocab_size
    least = vocab_size if base_vocab_size is None else base_vocab_size
    # All meshes need the same rows, because padding takes part in the loss.
    tensor_parallel_size = math.lcm(
        *(args.hetero_tensor_sizes or (args.tensor_model_parallel_size,))
    )
    if rows is None:
        return padded_vocab_size(
            vocab_size,
            make_divisible_by=args.make_vocab_size_divisible_by,
            tensor_parallel_size=tensor_parallel_size,
        )
    if args.use_checkpoint_args:
        if rows < least:
            raise UserError(
                f"the checkpoint has {rows} rows of vocabulary and the tokenizer {least} tokens; "
                "name the checkpoint's own with --tokenizer-type and --tokenizer-model",
                known_to_all=True,
            )
        return padded_vocab_size(
            rows, make_divisible_by=1, tensor_parallel_size=tensor_parallel_size
        )
    if rows < least or rows % tensor_parallel_size:
        raise UserError(
            f"--padded-vocab-size {rows} must be at least the tokenizer's {least} and a multiple "
            f"of {tensor_parallel_size}, of which every tensor-parallel rank has an equal part",
            known_to_all=True,
        )
    return int(rows)


def known_tokens(args: argparse.Namespace) -> int:
    """The ids that may occur in the data: those of the tokenizer for which there is a row."""
    rows = args.padded_vocab_size
    size = int(args.tokenizer_vocab_size)
    return size if rows is None else min(size, int(rows))
