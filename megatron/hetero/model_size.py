"""The size of the model of a command line, without building it."""

from __future__ import annotations

import argparse

from hetero.planner.model_shape import ModelShape, model_from_flags


def model_shape(args: argparse.Namespace, *, vocabulary: int | None = None) -> ModelShape:
    """What the planner knows the model by, its parameters counted.

    `vocabulary` is the rows of the embedding: left out, those in memory (`--padded-vocab-size`);
    the tokenizer's size for what is useful of them.
    """
    flags = vars(args) | ({} if vocabulary is None else {"padded_vocab_size": vocabulary})
    return model_from_flags(flags, source="the command line")
