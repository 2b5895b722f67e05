"""Complete a prompt with the model of any checkpoint, in one process.

hetero generate --load runs/llama --prompt "Once upon a time"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["generate", *sys.argv[1:]]))

from hetero.errors import UserError
from hetero.text import integer, number
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.arguments.flags_data import add_tokenizer_flags
from megatron.hetero.console import progress_bar
from megatron.hetero.import_core import import_megatron_core

if TYPE_CHECKING:
    from megatron.hetero.checkpoint.reader import CheckpointReader
    from megatron.hetero.tokenizer.build import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: complete(args))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Complete a prompt with the model of a checkpoint, whatever its layout.")
    parser.add_argument("--load", type=Path, required=True, help="folder that --save named")
    parser.add_argument("--ckpt-step", type=integer(0), help="step to read; default: the latest")
    parser.add_argument("--prompt", required=True, help="text to go on from")
    parser.add_argument("--max-new-tokens", type=integer(1), default=64, help="tokens to add")
    parser.add_argument(
        "--temperature",
        type=number(minimum=0),
        default=0.0,
        help="0 takes the likeliest token, 1 samples as the model says",
    )
    parser.add_argument(
        "--top-k", type=integer(0), default=0, help="sample from so many of the likeliest; 0: all"
    )
    parser.add_argument(
        "--top-p",
        type=number(minimum=0, below=1),
        default=0.0,
        help="sample from the likeliest that reach this probability; 0: all",
    )
    parser.add_argument(
        "--seed", type=integer(0, maximum=2**64 - 1), default=0, help="seed of the sampling"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; default: as they are stored",
    )
    add_tokenizer_flags(parser.add_argument_group("tokenizer, where it is not the checkpoint's"))
    return parser


def complete(args: argparse.Namespace) -> str:
    """The prompt and what the model makes of it. Raises HeteroError."""
    if not args.temperature and (args.top_k or args.top_p):
        raise UserError("--top-k and --top-p need --temperature; add it, for example 1")
    if not args.prompt:
        raise UserError("--prompt is empty; give at least one word")
    import_megatron_core()
    import torch

    from megatron.hetero.checkpoint.reader import CheckpointReader
    from megatron.hetero.checkpoint.tensor_names import EMBEDDING
    from megatron.hetero.generation import Sampling, generate, whole_model

    with CheckpointReader.open(args.load, iteration=args.ckpt_step) as reader:
        tokenizer = _tokenizer(args, reader)
        # An added token may have no row, and rows of padding have no token.
        known = min(tokenizer.vocab_size, reader.shape(EMBEDDING)[0])
        prompt = _tokens(args.prompt, tokenizer, known)
        for line in (*reader.notes, f"checkpoint {reader.title}"):
            print(line, file=sys.stderr)
        dtype = getattr(torch, args.dtype) if args.dtype else None
        with whole_model(reader, dtype=dtype) as model:
            if len(prompt) > model.max_sequence_length:
                print(
                    f"the prompt has {len(prompt)} tokens and the model only sees the last "
                    f"{model.max_sequence_length}, which is as far as its positions go",
                    file=sys.stderr,
                )
            stream = generate(
                model,
                prompt,
                Sampling(args.temperature, args.top_k, args.top_p),
                max_context=model.max_sequence_length,
                vocab_size=known,
                seed=args.seed,
            )
            found: list[int] = []
            for token in _shown(stream, args.max_new_tokens):
                if token == tokenizer.eod:
                    break
                found.append(token)
    return tokenizer.detokenize([*prompt, *found])


def _tokens(text: str, tokenizer: Tokenizer, known: int) -> list[int]:
    """The prompt's tokens, all below `known`; NullTokenizer takes any number, and no word."""
    try:
        tokens = tokenizer.tokenize(text)
    except ValueError as error:
        raise UserError(f"--prompt cannot be tokenized ({error}); check the text") from error
    for token in tokens:
        if not 0 <= token < known:
            whose = (
                "the tokenizer has" if known == tokenizer.vocab_size else "the model has rows for"
            )
            raise UserError(
                f"--prompt holds token {token} and {whose} {known}, from 0 on; name others"
            )
    return tokens


def _shown(stream: Any, count: int) -> Any:
    """The first `count` tokens, with a bar where there is a terminal."""
    with progress_bar(total=count, unit="token", leave=False) as bar:
        for token in islice(stream, count):
            yield token
            bar.update()


def _tokenizer(args: argparse.Namespace, reader: CheckpointReader) -> Tokenizer:
    """The one of the flags, or the checkpoint's; it must fit the checkpoint's vocabulary."""
    from megatron.hetero.checkpoint.tensor_names import EMBEDDING
    from megatron.hetero.generation import checkpoint_args
    from megatron.hetero.tokenizer.build import build_tokenizer

    chosen = args
    if args.tokenizer_type is None:
        chosen = checkpoint_args(reader)
        if args.tokenizer_model is not None:
            chosen.tokenizer_model = args.tokenizer_model
    tokenizer = build_tokenizer(chosen)
    rows, theirs = reader.shape(EMBEDDING)[0], reader.args.get("tokenizer_vocab_size")
    if tokenizer.base_vocab_size > rows or theirs not in (None, tokenizer.vocab_size):
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the checkpoint {reader.folder} "
            f"was trained with {theirs or f'at most {rows}'}; name the same one with "
            "--tokenizer-type and --tokenizer-model"
        )
    return tokenizer
