"""Turn text into the token files that Megatron trains on: PREFIX_text_document.bin and .idx."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["preprocess-data", *sys.argv[1:]]))

from hetero.errors import Faults, UserError
from hetero.text import counted, integer, text
from hetero.tools.preprocessing.batches import cut_batches
from hetero.tools.preprocessing.description import describe_run
from hetero.tools.preprocessing.encoder import Encoder
from hetero.tools.preprocessing.output_files import OutputFiles
from hetero.tools.preprocessing.progress import Progress
from hetero.tools.preprocessing.workers import encoded_in_order
from hetero.tools.text_input import FORMATS, TEXT_DOCUMENTS, InputFile, open_inputs
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.arguments.flags_data import add_tokenizer_flags
from megatron.hetero.dataset_description import Description


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: preprocess(args), interrupted="nothing was written")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Tokenize text into PREFIX_KEY_document.bin and .idx for Megatron.")
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="text or JSON Lines files or globs, also .gz and .zst",
    )
    group.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="auto goes by the file's extension, then by its first line",
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], help="JSON Lines: keys of the text"
    )
    group.add_argument(
        "--text-documents",
        choices=TEXT_DOCUMENTS,
        default="blank-line",
        help="plain text: a document ends at a blank line, at each line end, or with its file; "
        "training shares out whole documents between train, valid and test, so one document "
        "per file suits only many files, each small enough for memory",
    )
    _add_output_flags(parser.add_argument_group("output"))
    add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    return parser


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-prefix", required=True, type=text, help="path of the files, without suffix"
    )
    group.add_argument("--overwrite", action="store_true", help="replace files that exist")
    group.add_argument(
        "--append-eod", action="store_true", help="end every document with the end token"
    )
    group.add_argument(
        "--workers",
        type=integer(1),
        default=len(os.sched_getaffinity(0)),
        help="processes that tokenize; the output does not depend on it",
    )
    group.add_argument(
        "--log-interval",
        type=integer(1),
        default=1000,
        help="documents between progress lines, where there is no terminal for a bar",
    )


def preprocess(args: argparse.Namespace) -> str:
    """Write the token files and return the line that says what was written."""
    faults = Faults()
    files = faults.read(lambda: open_inputs(args.input, args.format))
    encoder = faults.read(lambda: Encoder(args))
    faults.refuse()
    assert files is not None
    assert encoder is not None
    _require_keys_fit(args.json_keys, files)
    output = OutputFiles(args.output_prefix, args.json_keys, overwrite=args.overwrite)
    progress = Progress(sum(file.size for file in files), args.log_interval)
    made = describe_run(args, files)
    with output:
        _tokenize(args, files, encoder, output, progress)
        _require_text(output, args.input)
        output.finish(Description(encoder.facts, bool(args.append_eod), made), encoder.dtype)
    return _summary(output, progress)


def _tokenize(
    args: argparse.Namespace,
    files: Sequence[InputFile],
    encoder: Encoder,
    output: OutputFiles,
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        batches = cut_batches(files, args.text_documents)
        encoded = stack.enter_context(encoded_in_order(batches, encoder, args))
        stack.enter_context(progress)
        for batch, result in encoded:
            tokens = [result[key] for key in args.json_keys]
            output.add(tokens, read=len(batch.documents))
            progress.update(batch, max(len(part.lengths) for part in tokens))


def _require_keys_fit(keys: Sequence[str], files: Sequence[InputFile]) -> None:
    if len(set(keys)) < len(keys):
        raise UserError(f"--json-keys {' '.join(keys)} names a key twice")
    plain = next((file.path for file in files if file.format == "text"), None)
    if plain is not None and list(keys) != ["text"]:
        raise UserError(
            f"--json-keys {' '.join(keys)} does not fit {plain}, which is plain text; leave the "
            "flag out, or say --format jsonl if it is JSON Lines"
        )


def _require_text(files: OutputFiles, inputs: Sequence[str]) -> None:
    for output in files.outputs:
        if not output.documents:
            raise UserError(
                f"--input {' '.join(inputs)} holds no text for {output.name}.bin; nothing was "
                "written"
            )


def _summary(files: OutputFiles, progress: Progress) -> str:
    documents = max(output.documents for output in files.outputs)
    tokens = sum(output.tokens for output in files.outputs)
    empty = files.read - documents
    left_out = f", {empty} empty ones left out" if empty else ""
    replaced = ""
    if files.replaced:
        what = counted(files.replaced, "document")
        replaced = f", U+FFFD in place of unpaired surrogates in {what}"
    names = ", ".join(name + suffix for name in files.names for suffix in (".bin", ".idx"))
    return (
        f"wrote {counted(documents, 'document')}, {counted(tokens, 'token')}{left_out}{replaced} "
        f"in {progress.seconds:.1f} s ({progress.text_bytes / progress.seconds / 1e6:.2f} MB/s): "
        f"{names}"
    )
