"""Convert LLaMA 3.x and Qwen2 checkpoints from Hugging Face's format to ours and back.

tools/convert_checkpoint.py hf-to-megatron Llama-3.1-8B checkpoints/llama
tools/convert_checkpoint.py megatron-to-hf checkpoints/llama Llama-tuned
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tools.command_line import begin_script

    begin_script()

from megatron.training.arguments.convert import integer
from tools.command_line import Parser, run


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: _to_megatron(args) if args.to_megatron else _to_huggingface(args))


class _Direction(Parser):
    """The parser of one direction, made by argparse."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(description)
        self.prog = prog


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Convert LLaMA 3.x and Qwen2 between Hugging Face's format and ours.")
    directions = parser.add_subparsers(
        dest="direction",
        required=True,
        metavar="hf-to-megatron|megatron-to-hf",
        parser_class=_Direction,
    )
    inward = directions.add_parser(
        "hf-to-megatron",
        description="Make a checkpoint that --load takes, in any layout, from a model's folder.",
    )
    inward.set_defaults(to_megatron=True)
    inward.add_argument("source", type=Path, metavar="SRC", help="folder with config.json")
    inward.add_argument("target", type=Path, metavar="DST", help="new folder, for --load")
    inward.add_argument(
        "--make-vocab-size-divisible-by",
        type=integer(1),
        help="pad the vocabulary with rows of zeros; left out: as many rows as the model has",
    )
    outward = directions.add_parser(
        "megatron-to-hf", description="Make a model's folder for transformers from a checkpoint."
    )
    outward.set_defaults(to_megatron=False)
    outward.add_argument("source", type=Path, metavar="SRC", help="folder that --save named")
    outward.add_argument("target", type=Path, metavar="DST", help="new folder")
    outward.add_argument("--ckpt-step", type=integer(0), help="step to read; left out: the latest")
    outward.add_argument(
        "--vocab-size",
        type=integer(1),
        help="rows of the vocabulary to keep; left out: as many as the tokenizer had",
    )
    outward.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of a Hugging Face tokenizer; left out: the one that the checkpoint names",
    )
    return parser


def _to_megatron(args: argparse.Namespace) -> str:
    from megatron.training.huggingface.convert import to_megatron

    done = to_megatron(args.source, args.target, divisible_by=args.make_vocab_size_divisible_by)
    tokenizer = "" if done.has_tokenizer else "; it had no tokenizer, so name one"
    return (
        f"{done.parameters:,} parameters, with {done.rows:,} rows of vocabulary, written to "
        f"{done.folder}; train from them with --load {args.target} --use-checkpoint-args{tokenizer}"
    )


def _to_huggingface(args: argparse.Namespace) -> str:
    from megatron.training.huggingface.convert import to_huggingface

    done = to_huggingface(
        args.source,
        args.target,
        iteration=args.ckpt_step,
        vocabulary=args.vocab_size,
        companions=args.tokenizer,
    )
    tokenizer = "its tokenizer" if done.has_tokenizer else "no tokenizer (--tokenizer names one)"
    unsaid = f"; their format has no word for {' '.join(done.unsaid)}, which training used"
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return (
        f"{done.parameters:,} parameters of {done.source} written to {done.folder}, with "
        f"{done.rows:,} rows of vocabulary and {tokenizer}{unsaid if done.unsaid else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
