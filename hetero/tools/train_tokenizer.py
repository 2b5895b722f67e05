"""Train a SentencePiece tokenizer of Llama 2's kind from text: PREFIX.model and PREFIX.vocab."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["train-tokenizer", *sys.argv[1:]]))

import sentencepiece

from hetero.errors import UserError
from hetero.text import integer, number, text
from hetero.tools.text_input import (
    FORMATS,
    Document,
    InputFile,
    naming,
    open_inputs,
    replace_unpaired_surrogates,
    temporary_name,
)
from hetero.tools.tool_command_line import Parser, interrupts_leave, run
from megatron.hetero.console import progress_bar

SENTENCE_BYTES = 4000
"""Longer lines are fed in parts: SentencePiece skips a sentence of more than 4192 bytes."""
_MOST_TRIES = 4
_MOST = 2**31 - 1
"""The largest number that SentencePiece reads."""
_WAIT_SECONDS = 1.0

LLAMA_OPTIONS: dict[str, Any] = {
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    # No rewriting of the text: what is tokenized can be read back letter by letter.
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    # No pad token, as in Llama 2: the 256 bytes take ids 3 to 258, and megatron-core's datasets
    # read -1 as "nothing is padded", where an id of its own would only widen the embedding.
    "pad_id": -1,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: train(args), interrupted="nothing was written")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Train a SentencePiece tokenizer; writes PREFIX.model and PREFIX.vocab.")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="text or JSON Lines files or globs, also .gz and .zst",
    )
    parser.add_argument(
        "--output-prefix", required=True, type=text, help="path of the files, without suffix"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.add_argument(
        "--vocab-size", type=integer(1, maximum=_MOST), required=True, help="number of tokens"
    )
    parser.add_argument(
        "--nearest-size",
        action="store_true",
        help="where no vocabulary of --vocab-size can be made of this text, take the nearest size",
    )
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="algorithm")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="auto goes by the file's extension, then by its first line",
    )
    parser.add_argument("--json-key", default="text", help="JSON Lines: key of the text")
    parser.add_argument(
        "--character-coverage",
        type=number(above=0, maximum=1),
        default=0.99995,
        help="share of the characters that get tokens of their own; the rest become bytes",
    )
    parser.add_argument(
        "--input-sentence-size",
        type=_drawn_lines,
        default=0,
        help="lines to draw at random from a text too large for memory, more than 100; 0 uses "
        "every line",
    )
    parser.add_argument(
        "--seed", type=integer(0, maximum=_MOST), default=1234, help="for the lines that are drawn"
    )
    parser.add_argument(
        "--threads",
        type=integer(1, maximum=_MOST),
        default=16,
        help="unigram: its scores depend on this number",
    )
    return parser


def _drawn_lines(text: str) -> int:
    """SentencePiece draws no fewer than 101 lines."""
    if (lines := integer(0, maximum=_MOST)(text)) and lines <= 100:
        raise argparse.ArgumentTypeError("must be 0 or more than 100")
    return lines


def train(args: argparse.Namespace) -> str:
    """Write the model and its vocabulary, and return the line that says so."""
    outputs = [f"{args.output_prefix}.model", f"{args.output_prefix}.vocab"]
    for path in outputs:
        if os.path.isdir(path) or (os.path.exists(path) and not args.overwrite):
            raise UserError(f"{path} exists; choose another --output-prefix or --overwrite it")
    files = open_inputs(args.input, args.format)
    model = _train_fitting(args, files)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    os.makedirs(os.path.dirname(outputs[0]) or ".", exist_ok=True)
    _write_together(dict(zip(outputs, (model, _vocabulary(processor)), strict=True)))
    return f"wrote {outputs[0]} and {outputs[1]}: vocabulary of {len(processor)} tokens"


class SizeError(UserError):
    """This text allows no vocabulary of the size that was asked for."""

    def __init__(self, text: str, *, possible: int) -> None:
        super().__init__(text)
        self.possible = possible


def _train_fitting(args: argparse.Namespace, files: Sequence[InputFile]) -> bytes:
    """The model of the size that was asked for, or of the nearest where any will do."""
    size = args.vocab_size
    for _ in range(_MOST_TRIES):
        try:
            return _train_model(args, files, size)
        except SizeError as error:
            if not args.nearest_size:
                raise
            size = error.possible
    raise UserError(
        "SentencePiece finds no vocabulary for this text; give a longer text, or one with fewer "
        "different characters"
    )


def _train_model(args: argparse.Namespace, files: Sequence[InputFile], size: int) -> bytes:
    """SentencePiece's model, held in memory so that no name of a temporary file ends up in it."""
    sentences = Sentences(files, args.json_key)
    model = io.BytesIO()

    def work() -> None:
        sentencepiece.set_random_generator_seed(args.seed)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=size,
            model_type=args.model_type,
            character_coverage=min(args.character_coverage, 1.0),
            input_sentence_size=args.input_sentence_size,
            shuffle_input_sentence=args.input_sentence_size > 0,
            num_threads=args.threads,
            minloglevel=2,
            **LLAMA_OPTIONS,
        )

    try:
        # In a thread, as Python answers ctrl-C only between steps of its own: here, in the wait.
        with interrupts_leave(), futures.ThreadPoolExecutor(1) as pool:
            trained = pool.submit(work)
            # In slices, since a signal that comes right before a wait is answered after it.
            while not futures.wait([trained], _WAIT_SECONDS).done:
                pass
            trained.result()
    except (RuntimeError, OSError) as error:
        # SentencePiece turns an error in reading the text into its own; tell the first one.
        raise sentences.error or _explained(error, args, size, sentences.count) from error
    return model.getvalue()


def _explained(error: Exception, args: argparse.Namespace, size: int, sentences: int) -> UserError:
    """SentencePiece's complaint as one sentence. What it suggests stands only in its text."""
    message = str(error).strip()
    if not sentences:
        return UserError(f"--input {' '.join(args.input)} holds no text to train on")
    for pattern, word, least in (
        (r"too high.*<= (\d+)", "large", "at most {}, or more text"),
        (
            r"smaller than required_chars\. \d+ vs (\d+)",
            "small",
            "at least {}, or a lower --character-coverage",
        ),
    ):
        if found := re.search(pattern, message):
            return SizeError(
                f"--vocab-size {size} is too {word} for this text; use {least.format(found[1])}",
                possible=int(found[1]),
            )
    return UserError(f"SentencePiece cannot train on this text: {message.splitlines()[0]}")


class Sentences:
    """The lines of every document, with a progress bar, for SentencePiece to pull one by one."""

    def __init__(self, files: Sequence[InputFile], json_key: str) -> None:
        self._files = files
        self._json_key = json_key
        self.count = 0
        self.error: UserError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._sentences()
        except UserError as error:
            self.error = error
            raise

    def _sentences(self) -> Iterator[str]:
        total = sum(file.size for file in self._files)
        with progress_bar(total=total, unit="B", unit_scale=True, desc="reading") as bar:
            for file in self._files:
                counted = 0
                for document in file.documents("line"):
                    for sentence in cut_sentences(self._text(file, document)):
                        self.count += 1
                        yield sentence
                    bar.update(file.position - counted)
                    counted = file.position
                bar.update(file.size - counted)

    def _text(self, file: InputFile, document: Document) -> str:
        if file.format == "jsonl":
            text = document.values([self._json_key])[self._json_key]
            return replace_unpaired_surrogates(text)
        return document.text()


def cut_sentences(text: str) -> Iterator[str]:
    """The lines of a text, cut between words where they are too long for SentencePiece."""
    for line in text.splitlines():
        if len(line.encode()) <= SENTENCE_BYTES:
            parts = [line]
        else:
            # A character is up to four bytes, and a part is a quarter as many characters.
            parts = re.findall(
                rf".{{1,{SENTENCE_BYTES // 4}}}(?!\S)|.{{{SENTENCE_BYTES // 4}}}", line
            )
        yield from (part for part in parts if part.strip())


def _vocabulary(processor: sentencepiece.SentencePieceProcessor) -> bytes:
    """Token and score on each line, as SentencePiece's own trainer writes them."""
    lines = (
        f"{processor.id_to_piece(id)}\t{processor.get_score(id):g}\n"
        for id in range(len(processor))
    )
    return "".join(lines).encode()


def _write_together(contents: dict[str, bytes]) -> None:
    try:
        for path, content in contents.items():
            with naming(path):
                Path(temporary_name(path)).write_bytes(content)
        for path in contents:
            os.replace(temporary_name(path), path)
    finally:
        for path in contents:
            with suppress(OSError):
                os.remove(temporary_name(path))
