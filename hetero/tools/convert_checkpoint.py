"""Convert checkpoints from Hugging Face's format and Megatron-LM's own to ours, and back.

hetero convert hf-to-megatron Llama-3.1-8B checkpoints/llama
hetero convert megatron-to-hf checkpoints/llama Llama-tuned
hetero convert import-megatron megatron-lm/checkpoints checkpoints/llama
hetero convert export-megatron checkpoints/llama megatron-lm/tuned
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["convert", *sys.argv[1:]]))

from hetero.errors import UserError
from hetero.text import integer
from hetero.tools.tool_command_line import Parser, run


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: args.convert(args))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "Convert checkpoints between ours, Hugging Face's (LLaMA, Qwen2, Qwen3, Mistral, OLMo-2, "
        "Phi-3, Granite, Qwen3-MoE, Mixtral, DeepSeek-V2 and V3) and Megatron-LM's own formats "
        "(dense GPT models)."
    )
    directions = parser.add_subparsers(
        dest="direction",
        required=True,
        metavar="hf-to-megatron|megatron-to-hf|import-megatron|export-megatron",
    )
    _add_huggingface(directions)
    _add_megatron_lm(directions)
    return parser


def _add_huggingface(directions: argparse._SubParsersAction[Parser]) -> None:
    inward = directions.add_parser(
        "hf-to-megatron",
        description="Make a checkpoint that --load takes, in any layout, from a model's folder.",
    )
    inward.set_defaults(convert=_to_megatron)
    inward.add_argument("source", type=Path, metavar="SRC", help="folder with config.json")
    inward.add_argument("target", type=Path, metavar="DST", help="new folder, for --load")
    inward.add_argument(
        "--make-vocab-size-divisible-by",
        type=integer(1),
        help="pad the vocabulary with rows of zeros; default: as many rows as the model has",
    )
    outward = directions.add_parser(
        "megatron-to-hf", description="Make a model's folder for transformers from a checkpoint."
    )
    outward.set_defaults(convert=_to_huggingface)
    outward.add_argument("source", type=Path, metavar="SRC", help="folder that --save named")
    outward.add_argument("target", type=Path, metavar="DST", help="new folder")
    outward.add_argument("--ckpt-step", type=integer(0), help="step to read; default: the latest")
    outward.add_argument(
        "--vocab-size",
        type=integer(1),
        help="rows of the vocabulary to keep; default: as many as the tokenizer had, or the "
        "model that was converted",
    )
    outward.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="folder of a Hugging Face tokenizer, or a SentencePiece model; default: the "
        "checkpoint's",
    )


def _add_megatron_lm(directions: argparse._SubParsersAction[Parser]) -> None:
    inward = directions.add_parser(
        "import-megatron",
        description="Make a checkpoint that --load takes, in any layout, from one that Megatron-LM "
        "saved in its formats torch_dist or torch.",
    )
    inward.set_defaults(convert=_from_megatron_lm)
    inward.add_argument("source", type=Path, metavar="SRC", help="folder that --save named there")
    inward.add_argument("target", type=Path, metavar="DST", help="new folder, for --load")
    inward.add_argument("--ckpt-step", type=integer(0), help="step to read; default: the latest")
    inward.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer's state behind"
    )
    outward = directions.add_parser(
        "export-megatron",
        description="Make a checkpoint that Megatron-LM's --load takes from ours.",
    )
    outward.set_defaults(convert=_for_megatron_lm)
    outward.add_argument("source", type=Path, metavar="SRC", help="folder that --save named")
    outward.add_argument("target", type=Path, metavar="DST", help="new folder, for --load there")
    outward.add_argument("--ckpt-step", type=integer(0), help="step to read; default: the latest")
    outward.add_argument(
        "--tensor-model-parallel-size",
        type=integer(1),
        default=1,
        help="ranks, for --make-vocab-size-divisible-by",
    )
    for flag in _OF_FORMAT_TORCH:
        outward.add_argument(flag, help=argparse.SUPPRESS)
    outward.add_argument(
        "--make-vocab-size-divisible-by",
        type=integer(1),
        help="give the vocabulary as many rows as Megatron-LM computes from this and the "
        "tensor-parallel size; default: as many as it has",
    )
    outward.add_argument(
        "--use-distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whose state to write; default: what the run used",
    )
    outward.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer's state behind"
    )


def _to_megatron(args: argparse.Namespace) -> str:
    from megatron.hetero.huggingface.convert import to_megatron

    done = to_megatron(args.source, args.target, divisible_by=args.make_vocab_size_divisible_by)
    tokenizer = "" if done.has_tokenizer else "; it had no tokenizer, so name one"
    _print_notes(done.notes)
    return (
        f"{done.parameters:,} parameters, with {done.rows:,} rows of vocabulary, written to "
        f"{done.folder}; train from them with --load {args.target} --use-checkpoint-args{tokenizer}"
    )


def _to_huggingface(args: argparse.Namespace) -> str:
    from megatron.hetero.huggingface.convert import to_huggingface

    done = to_huggingface(
        args.source,
        args.target,
        iteration=args.ckpt_step,
        vocabulary=args.vocab_size,
        tokenizer=args.tokenizer,
    )
    tokenizer = "its tokenizer" if done.has_tokenizer else "no tokenizer (--tokenizer names one)"
    dropped = f"; config.json has no key for {' '.join(done.dropped_flags)}, which training used"
    _print_notes(done.notes)
    return (
        f"{done.parameters:,} parameters of {done.source} written to {done.folder}, with "
        f"{done.rows:,} rows of vocabulary and {tokenizer}{dropped if done.dropped_flags else ''}"
    )


def _from_megatron_lm(args: argparse.Namespace) -> str:
    from megatron.hetero.megatron_lm.importing import import_checkpoint

    done = import_checkpoint(
        args.source, args.target, iteration=args.ckpt_step, weights_only=args.weights_only
    )
    if done.iteration is None:
        how = f"its weights alone; train from them with --load {args.target} --use-checkpoint-args"
    else:
        how = (
            f"with the optimizer's state; train on from iteration {done.iteration} with --load "
            f"{args.target} --use-checkpoint-args --no-load-rng"
        )
    return (
        f"{done.parameters:,} parameters of {done.source}, with {done.rows:,} rows of vocabulary, "
        f"written to {done.folder}, {how}"
    )


_OF_FORMAT_TORCH = (
    "--format",
    "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--transformer-impl",
)
"""Flags of a format that is read, but not written."""


def _for_megatron_lm(args: argparse.Namespace) -> str:
    from megatron.hetero.megatron_lm.exporting import ExportOptions, export_checkpoint

    values = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in _OF_FORMAT_TORCH}
    given = [flag for flag, value in values.items() if value not in (None, "torch_dist")]
    if given:
        raise UserError(
            f"{', '.join(given)}: the format torch is read and not written; leave the flag out: "
            "torch_dist, which is written, fits every layout, and Megatron-LM converts it with "
            "--ckpt-convert-format torch --ckpt-convert-save"
        )
    options = ExportOptions(
        weights_only=args.weights_only,
        distributed_optimizer=args.use_distributed_optimizer,
        divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
    )
    done = export_checkpoint(args.source, args.target, options, iteration=args.ckpt_step)
    if done.iteration is None:
        how = "the weights alone, as a release"
    else:
        how = f"with the optimizer's state, of iteration {done.iteration}"
    _print_notes(done.notes)
    return (
        f"{done.parameters:,} parameters of {done.source}, with {done.rows:,} rows of vocabulary, "
        f"written to {done.folder} in the format torch_dist, {how}; Megatron-LM "
        f"trains from them with --load {args.target}"
    )


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
