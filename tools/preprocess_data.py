"""Turn text into the token files that Megatron trains on: PREFIX_text_document.bin and .idx."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
from tqdm import tqdm

if not __package__:  # Run as a script, where only tools/ itself would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hetero.errors import UserError
from megatron.training.arguments.convert import integer
from megatron.training.arguments.data import add_tokenizer_flags
from tools.command_line import Parser, run
from tools.text_input import (
    FORMATS,
    TEXT_DOCUMENTS,
    Document,
    InputFile,
    open_inputs,
    temporary_name,
)

BATCH_BYTES = 1 << 18
BATCH_DOCUMENTS = 1000
BATCHES_AHEAD = 4
"""Batches read ahead for each worker: enough to keep it busy, few enough to keep memory flat."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: preprocess(args))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Tokenize text into PREFIX_KEY_document.bin and .idx for Megatron.")
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input", nargs="+", required=True, help="text or JSON Lines files or globs, also .gz"
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
    group.add_argument("--output-prefix", required=True, help="path of the files, without suffix")
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
    files = open_inputs(args.input, args.format)
    _require_keys_fit(args.json_keys, files)
    outputs = {key: Output(args.output_prefix, key) for key in args.json_keys}
    for output in outputs.values():
        output.refuse_existing(args.overwrite)
    encoder = Encoder(args)
    progress = Progress(sum(file.size for file in files), args.log_interval)
    with ExitStack() as stack:
        for output in outputs.values():
            stack.enter_context(output)
            output.open(encoder.dtype)
        batches = cut_batches(files, args.text_documents)
        encoded = stack.enter_context(encoded_in_order(batches, encoder, args))
        stack.enter_context(progress)
        for batch, result in encoded:
            for key, tokens in result.items():
                outputs[key].add(tokens)
            progress.update(batch, max(len(tokens.lengths) for tokens in result.values()))
        _require_text(outputs.values(), args.input)
        for output in outputs.values():
            output.publish()
    return _summary(list(outputs.values()), progress)


def _require_keys_fit(keys: Sequence[str], files: Sequence[InputFile]) -> None:
    if len(set(keys)) < len(keys):
        raise UserError(f"--json-keys {' '.join(keys)} names a key twice")
    text = next((file.path for file in files if file.format == "text"), None)
    if text is not None and list(keys) != ["text"]:
        raise UserError(
            f"--json-keys {' '.join(keys)} does not fit {text}, which is plain text; leave the "
            "flag out, or say --format jsonl if it is JSON Lines"
        )


def _require_text(outputs: Iterable[Output], inputs: Sequence[str]) -> None:
    for output in outputs:
        if not output.documents:
            raise UserError(
                f"--input {' '.join(inputs)} holds no text for {output.bin}; nothing was written"
            )


def _summary(outputs: Sequence[Output], progress: Progress) -> str:
    seconds = progress.seconds
    documents = max(output.documents for output in outputs)
    tokens = sum(output.tokens for output in outputs)
    empty = progress.read - progress.documents
    left_out = f", {empty} empty ones left out" if empty else ""
    files = ", ".join(path for output in outputs for path in (output.bin, output.idx))
    return (
        f"wrote {documents} documents, {tokens} tokens{left_out} in {seconds:.1f} s "
        f"({progress.text_bytes / seconds / 1e6:.2f} MB/s): {files}"
    )


@dataclass(frozen=True)
class Batch:
    """Documents that travel to a worker together, and the bytes read from disk to get them."""

    documents: tuple[Document, ...]
    text_bytes: int
    disk_bytes: int
    text_key: str | None = None


def cut_batches(files: Sequence[InputFile], text_documents: str) -> Iterator[Batch]:
    """Group the documents of each file; where a batch ends does not show in the output."""
    for file in files:
        text_key = "text" if file.format == "text" else None
        documents: list[Document] = []
        size = counted = 0
        for document in file.documents(text_documents):
            documents.append(document)
            size += len(document.data)
            if size >= BATCH_BYTES or len(documents) >= BATCH_DOCUMENTS:
                position = file.position
                yield Batch(tuple(documents), size, position - counted, text_key)
                documents, size, counted = [], 0, position
        if documents:
            yield Batch(tuple(documents), size, file.size - counted, text_key)


@dataclass
class Tokens:
    """The tokens of several documents, end to end, and the length of each."""

    ids: numpy.ndarray
    lengths: list[int]


class Encoder:
    """Text to token ids, with the tokenizer built once in each process that has one."""

    def __init__(self, args: argparse.Namespace) -> None:
        with warnings.catch_warnings():
            # megatron-core warns at import about GPU libraries that no tokenizer needs.
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import DType

            from megatron.training.tokenizer import build_tokenizer
        self._tokenizer = build_tokenizer(args)
        self._keys = tuple(args.json_keys)
        self._end = [self._tokenizer.eod] if args.append_eod else []
        self._vocab_size = self._tokenizer.vocab_size
        self.dtype = DType.optimal_dtype(self._vocab_size)

    def encode(self, batch: Batch) -> dict[str, Tokens]:
        """The tokens of a batch under every key; documents without any are left out."""
        found: dict[str, list[numpy.ndarray]] = {key: [] for key in self._keys}
        for document in batch.documents:
            for key, text in self._texts(document, batch.text_key).items():
                ids = self._ids(document, text)
                if ids.size:
                    found[key].append(ids)
        return {key: self._join(documents) for key, documents in found.items()}

    def _texts(self, document: Document, text_key: str | None) -> dict[str, str]:
        return document.values(self._keys) if text_key is None else {text_key: document.text()}

    def _ids(self, document: Document, text: str) -> numpy.ndarray:
        try:
            plain = self._tokenizer.tokenize(text) if text else []
        except Exception as error:
            raise document.error(f"cannot be tokenized ({error}); check the text") from error
        ids = numpy.array(plain + self._end if plain else [], dtype=numpy.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise document.error(
                f"gives token id {wrong}, outside the tokenizer's vocabulary of "
                f"{self._vocab_size}; check --tokenizer-model and --vocab-size"
            )
        return ids.astype(self.dtype)

    def _join(self, documents: list[numpy.ndarray]) -> Tokens:
        ids = numpy.concatenate(documents) if documents else numpy.empty(0, dtype=self.dtype)
        return Tokens(ids, [document.size for document in documents])


Encoded = Iterator[tuple[Batch, dict[str, Tokens]]]


@contextmanager
def encoded_in_order(
    batches: Iterator[Batch], encoder: Encoder, args: argparse.Namespace
) -> Iterator[Encoded]:
    """Every batch with its tokens, in the order of the input whatever the number of workers."""
    if args.workers == 1:
        yield ((batch, encoder.encode(batch)) for batch in batches)
        return
    with _worker_processes(args) as executor:
        yield _encoded_by_workers(executor, batches, args.workers * BATCHES_AHEAD)


def _encoded_by_workers(
    executor: ProcessPoolExecutor, batches: Iterator[Batch], ahead: int
) -> Encoded:
    """Keep at most `ahead` batches under way; a pool's own `map` would read the whole input."""
    under_way: deque[tuple[Batch, Future[dict[str, Tokens]]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch, executor.submit(_encode_in_worker, batch)))
            if len(under_way) >= ahead:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, most often for lack of memory; use fewer --workers or "
            "shorter documents"
        ) from error


@contextmanager
def _worker_processes(args: argparse.Namespace) -> Iterator[ProcessPoolExecutor]:
    """Workers that inherit the imported libraries, and are gone when the body ends or fails."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        args.workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(args,),
    )
    # The first task forks all workers, here, before a progress bar starts its thread.
    executor.submit(int)
    try:
        yield executor
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_worker_encoder: Encoder | None = None


def _start_worker(args: argparse.Namespace) -> None:
    global _worker_encoder
    # The parent alone answers ctrl-C and SIGTERM; it ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Where the parent is killed outright, nobody else would.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _worker_encoder = Encoder(args)


def _encode_in_worker(batch: Batch) -> dict[str, Tokens]:
    assert _worker_encoder is not None
    return _worker_encoder.encode(batch)


class Output:
    """One .bin and .idx pair, under temporary names until both are complete."""

    def __init__(self, prefix: str, key: str) -> None:
        self.bin = f"{prefix}_{key}_document.bin"
        self.idx = f"{prefix}_{key}_document.idx"
        self.documents = self.tokens = 0
        self._builder: Any = None

    def refuse_existing(self, overwrite: bool) -> None:
        for path in (self.bin, self.idx):
            if os.path.isdir(path) or (os.path.exists(path) and not overwrite):
                raise UserError(f"{path} exists; choose another --output-prefix or --overwrite it")

    def open(self, dtype: type[numpy.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        os.makedirs(os.path.dirname(self.bin) or ".", exist_ok=True)
        self._builder = IndexedDatasetBuilder(temporary_name(self.bin), dtype=dtype)
        # megatron-core keeps two Python integers for each document; arrays take a sixth of that.
        self._builder.sequence_lengths = array("i")
        self._builder.document_indices = array("q", [0])

    def add(self, tokens: Tokens) -> None:
        start = 0
        for length in tokens.lengths:
            self._builder.add_document(tokens.ids[start : start + length], [length])
            start += length
        self.documents += len(tokens.lengths)
        self.tokens += start

    def publish(self) -> None:
        """Show the finished pair: a reader needs both, and the .idx comes last."""
        self._builder.finalize(temporary_name(self.idx))
        for path in (self.bin, self.idx):
            with open(temporary_name(path), "rb") as stream:
                os.fsync(stream.fileno())
        with suppress(FileNotFoundError):
            os.remove(self.idx)
        os.replace(temporary_name(self.bin), self.bin)
        os.replace(temporary_name(self.idx), self.idx)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._builder is not None:
            self._builder.data_file.close()
        for path in (self.bin, self.idx):
            # Usually there is none left, and nothing here may hide the error that came first.
            with suppress(OSError):
                os.remove(temporary_name(path))


@dataclass
class Progress:
    """A bar of bytes read on a terminal, and a line now and then where there is none."""

    total: int
    log_interval: int
    read: int = 0
    documents: int = 0
    text_bytes: int = 0
    _started: float = field(default_factory=time.perf_counter)
    _bar: Any = None

    def update(self, batch: Batch, documents: int) -> None:
        due = self.documents // self.log_interval
        self.read += len(batch.documents)
        self.documents += documents
        self.text_bytes += batch.text_bytes
        self._bar.update(batch.disk_bytes)
        rate = f"{self.documents / self.seconds:.0f} docs/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(rate, refresh=False)
        elif self.documents // self.log_interval > due:
            speed = f"{self.text_bytes / self.seconds / 1e6:.2f} MB/s"
            print(f"processed {self.documents} documents ({rate}, {speed})", file=sys.stderr)

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self._started, 1e-9)

    def __enter__(self) -> Progress:
        self._started = time.perf_counter()
        # Without a terminal tqdm switches itself off.
        self._bar = tqdm(
            total=self.total, unit="B", unit_scale=True, desc="tokenizing", disable=None
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
