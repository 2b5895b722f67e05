"""Fill-in-the-middle: documents in another order, so that a model learns to write what is missing.

A document is cut into prefix, middle and suffix at two characters, and becomes `<prefix> prefix
<suffix> suffix <middle> middle` (PSM) or `<prefix> <suffix> suffix <middle> prefix middle` (SPM).
Flags and meaning are those of Megatron-LM's GPTFIMDataset. It draws from one generator, in the
order in which a process happens to read. Here what is drawn follows from the seed and the sample's
index alone: the first stage's tokens and the last stage's labels are the same text, read by any
number of workers, in any layout, before and after a restart.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy

from hetero.errors import UserError
from megatron.training.tokenizer.wrapper import Tokenizer

_PARTS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Reorders samples of tokens; rates are probabilities."""

    tokenizer: Tokenizer
    seed: int
    rate: float
    """Of a document to be reordered at all."""
    spm_rate: float
    """Of a reordered text to begin with its suffix."""
    fragment_rate: float | None
    """Of each fragment of a document that `separator` cuts."""
    no_prefix: str | None
    """Text that begins with this stays as it is."""
    prefix: int
    middle: int
    suffix: int
    pad: int
    ends: frozenset[int]
    """Tokens that end a document."""
    separator: int | None

    @property
    def ids(self) -> list[int | None]:
        """What every node's tokenizer has to agree on."""
        return [
            *(self.prefix, self.middle, self.suffix, self.pad),
            *sorted(self.ends),
            self.separator,
        ]

    def reorder(self, sample: numpy.ndarray, index: int) -> numpy.ndarray:
        """The sample with this index in its dataset, int64, in its new order and old length.

        What no longer fits is cut off at the end; what is missing there is padding.
        """
        # Of all generators only this method of this one is promised to be the same in every
        # version of its library, and the two vendors' installations may differ.
        draws = random.Random(f"{self.seed} {index}")
        parts: list[numpy.ndarray] = []
        for document, end in _cut(sample, self.ends):
            parts += [self._document(document, draws), end]
        found = numpy.concatenate(parts)[: len(sample)]
        padding = numpy.full(len(sample) - len(found), self.pad)
        return numpy.concatenate([found, padding]).astype(numpy.int64)

    def _document(self, tokens: numpy.ndarray, draws: random.Random) -> numpy.ndarray:
        if self.separator is None or self.fragment_rate is None or self.separator not in tokens:
            return self._text(tokens, self.rate, draws)
        if draws.random() >= self.rate:
            return tokens
        parts: list[numpy.ndarray] = []
        for fragment, separator in _cut(tokens, {self.separator}):
            parts += [self._text(fragment, self.fragment_rate, draws), separator]
        return numpy.concatenate(parts)

    def _text(self, tokens: numpy.ndarray, rate: float, draws: random.Random) -> numpy.ndarray:
        if not len(tokens) or draws.random() >= rate:
            return tokens
        text = self.tokenizer.detokenize(tokens)
        if not text or (self.no_prefix is not None and text.startswith(self.no_prefix)):
            return tokens
        first, last = sorted(int(draws.random() * (len(text) + 1)) for _ in range(2))
        prefix, middle, suffix = (
            self.tokenizer.tokenize(part) for part in (text[:first], text[first:last], text[last:])
        )
        if draws.random() < self.spm_rate:
            order = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            order = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return numpy.array(order, dtype=numpy.int64)


def _cut(
    tokens: numpy.ndarray, ends: Collection[int]
) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
    """What lies between the tokens `ends`, each with the one that ends it; the last has none."""
    begin = 0
    for end in map(int, numpy.flatnonzero(numpy.isin(tokens, list(ends)))):
        yield tokens[begin:end], tokens[end : end + 1]
        begin = end + 1
    yield tokens[begin:], tokens[len(tokens) :]


def fill_in_middle(args: argparse.Namespace, tokenizer: Tokenizer) -> FillInMiddle | None:
    """What --fim-data and its flags ask for; None without it.

    Raises UserError where the tokenizer lacks a token that they name, or takes no text.
    """
    if not args.fim_data:
        return None
    _require_text(args, tokenizer)
    flags = [f"fim_{part}_token" for part in _PARTS]
    if args.fim_split_sample is not None:
        flags.append("fim_split_sample")
    ids = {flag: _token_id(tokenizer, getattr(args, flag)) for flag in flags}
    if lacking := [flag for flag, found in ids.items() if found is None]:
        raise _lacks_tokens(args, lacking, _token_name(tokenizer, tokenizer.eod))
    known = {flag: found for flag, found in ids.items() if found is not None}
    return FillInMiddle(
        tokenizer=tokenizer,
        seed=args.seed,
        rate=args.fim_rate,
        spm_rate=args.fim_spm_rate,
        fragment_rate=args.fim_fragment_rate,
        no_prefix=args.fim_no_prefix,
        prefix=known["fim_prefix_token"],
        middle=known["fim_middle_token"],
        suffix=known["fim_suffix_token"],
        pad=known["fim_pad_token"],
        # tools/preprocess_data.py writes the second, whatever the flag says.
        ends=frozenset({known["fim_eod_token"], tokenizer.eod}),
        separator=known.get("fim_split_sample"),
    )


def _require_text(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    try:
        tokenizer.detokenize(tokenizer.tokenize("text"))
    except Exception as error:
        raise UserError(
            "--fim-data needs a tokenizer that turns tokens into text and back, and "
            f"--tokenizer-type {args.tokenizer_type} does not; name one of text"
        ) from error


def _lacks_tokens(args: argparse.Namespace, flags: list[str], end: str | None) -> UserError:
    named = [f"{getattr(args, flag)} (--{flag.replace('_', '-')})" for flag in flags]
    own_end = f"; its documents end with {end}" if "fim_eod_token" in flags and end else ""
    return UserError(
        f"--fim-data: the tokenizer has no token {', '.join(named)}; add what is missing with "
        f"--tokenizer-special-tokens, or name tokens that it has{own_end}"
    )


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a token; None if there is none, where libraries answer with the unknown token."""
    try:
        (found,) = tokenizer.library_tokenizer.tokens_to_ids([name])
    except Exception:  # each library has its own
        return None
    return found if isinstance(found, int) and _token_name(tokenizer, found) == name else None


def _token_name(tokenizer: Tokenizer, token: int) -> str | None:
    try:
        (name,) = tokenizer.library_tokenizer.ids_to_tokens([token])
    except Exception:  # each library has its own
        return None
    return name if isinstance(name, str) else None
