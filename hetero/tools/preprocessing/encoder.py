"""Text to token ids, many documents at a time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hetero.tools.preprocessing.batches import Batch
from hetero.tools.text_input import Document, replace_unpaired_surrogates
from megatron.hetero.dataset_description import TokenizerInfo
from megatron.hetero.import_core import import_megatron_core

Tokenize = Callable[[list[str]], list[numpy.ndarray]]
"""The ids of each text, as integers of any width."""

_PROBE = "A  probe of 1969:\n\tléap 漢字 \U0001f600 <s>[INST]</s> don't "


@dataclass(frozen=True)
class Tokens:
    """The tokens of several documents, end to end, and the length of each."""

    ids: numpy.ndarray
    lengths: numpy.ndarray
    replaced: int
    """Documents with U+FFFD in place of an unpaired surrogate."""


class Encoder:
    """The tokenizer of a run, built once in each process that has one."""

    def __init__(self, args: argparse.Namespace) -> None:
        import_megatron_core()
        from megatron.core.datasets.indexed_dataset import DType

        from megatron.hetero.tokenizer.build import build_tokenizer, tokenizer_digest

        self._tokenizer = build_tokenizer(args)
        self._tokenize = tokenize_many(self._tokenizer)
        self._keys = tuple(args.json_keys)
        self._begin = numpy.array(self._tokenizer.begin, dtype=numpy.int64)
        self._end = numpy.array([self._tokenizer.eod] if args.append_eod else [], dtype=numpy.int64)
        self._vocab_size = self._tokenizer.vocab_size
        self.facts = TokenizerInfo(
            type=args.tokenizer_type,
            vocab_size=self._vocab_size,
            digest=tokenizer_digest(self._tokenizer),
            model=args.tokenizer_model or args.vocab_file,
            begin=self._tokenizer.begin,
        )
        self.dtype: type[numpy.number[Any]] = DType.optimal_dtype(self._vocab_size)

    def encode(self, batch: Batch) -> dict[str, Tokens]:
        """The tokens of a batch under every key; documents without any are left out."""
        texts: dict[str, list[str]] = {key: [] for key in self._keys}
        for document in batch.documents:
            for key, text in self._texts(document, batch.text_key).items():
                texts[key].append(text)
        return {key: self._tokens(batch.documents, found) for key, found in texts.items()}

    def _texts(self, document: Document, text_key: str | None) -> dict[str, str]:
        return document.values(self._keys) if text_key is None else {text_key: document.text()}

    def _tokens(self, documents: Sequence[Document], given: list[str]) -> Tokens:
        texts = [replace_unpaired_surrogates(text) for text in given]
        replaced = sum(text is not own for text, own in zip(texts, given, strict=True))
        try:
            encoded = self._tokenize(texts)
        except Exception:  # whatever a library raises; one at a time tells for which document
            encoded = list(map(self._tokenize_one, documents, texts))
        present = [ids for ids in encoded if len(ids)]
        added = len(self._begin) + len(self._end)
        lengths = numpy.array([len(ids) + added for ids in present], dtype=numpy.int32)
        parts = [part for ids in present for part in (self._begin, ids, self._end)]
        ids = numpy.concatenate(parts) if parts else self._end[:0]
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            self._refuse_first_outside(documents, encoded)
        return Tokens(ids.astype(self.dtype), lengths, replaced)

    def _tokenize_one(self, document: Document, text: str) -> numpy.ndarray:
        try:
            return self._tokenize([text])[0]
        except Exception as error:
            raise document.error(f"cannot be tokenized ({error}); check the text") from error

    def _refuse_first_outside(
        self, documents: Sequence[Document], encoded: list[numpy.ndarray]
    ) -> None:
        for document, ids in zip(documents, encoded, strict=True):
            for token in (*self._begin, *ids, *self._end):
                if not 0 <= token < self._vocab_size:
                    raise document.error(
                        f"gives token id {token}, outside the tokenizer's vocabulary of "
                        f"{self._vocab_size}; check --tokenizer-model and --vocab-size"
                    )


def tokenize_many(tokenizer: Any) -> Tokenize:
    """The fastest way to the ids that `tokenizer.text_ids` gives, for many texts at once.

    megatron-core takes one text at a time, and Hugging Face's by way of the tokens' names. The
    libraries underneath take a list, which saves up to a third of the time. Where theirs would
    differ, as special tokens and older SentencePiece rules make it, megatron-core's answer counts.
    """

    def one_by_one(texts: list[str]) -> list[numpy.ndarray]:
        return [numpy.array(tokenizer.text_ids(text) if text else [], int) for text in texts]

    def answers(tokenize: Tokenize) -> list[list[int]]:
        return [ids.tolist() for ids in tokenize([_PROBE, ""])]

    together = _library_call(tokenizer)
    if together is None or answers(together) != answers(one_by_one):
        return one_by_one
    return together


def _library_call(tokenizer: Any) -> Tokenize | None:
    if tokenizer.library == "sentencepiece":
        return _sentencepiece_call(tokenizer.library_tokenizer)
    if tokenizer.library == "huggingface":
        return _huggingface_call(tokenizer.library_tokenizer)
    return None


def _sentencepiece_call(core: Any) -> Tokenize | None:
    # Older releases only give lists.
    if core.legacy or not hasattr(core.tokenizer, "encode_as_numpy"):
        return None
    return lambda texts: core.tokenizer.encode_as_numpy(texts, num_threads=1)


def _huggingface_call(core: Any) -> Tokenize | None:
    rust = getattr(core.tokenizer, "backend_tokenizer", None)
    if core.include_special_tokens or rust is None:
        return None
    # A tokenizer file may ask for both; transformers switches them off before it tokenizes.
    rust.no_truncation()
    rust.no_padding()

    def encode(texts: list[str]) -> list[numpy.ndarray]:
        found = rust.encode_batch_fast(texts, add_special_tokens=False)
        return [numpy.array(encoding.ids, dtype=numpy.int32) for encoding in found]

    return encode
