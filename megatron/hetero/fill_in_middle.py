"""Fill-in-the-middle (--fim-data): reorders documents so that a model learns infilling.

A document is split into prefix, middle and suffix at two random characters, and becomes `<prefix>
prefix <suffix> suffix <middle> middle` (PSM) or `<prefix> <suffix> suffix <middle> prefix middle`
(SPM). Flags are those of Megatron-LM's GPTFIMDataset, which draws from one generator in reading
order. Here random choices depend on the seed and the sample's index only: the first stage's tokens
and the last stage's labels must agree, for any number of workers, any layout and after a restart.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy

from hetero.errors import UserError
from megatron.hetero.tokenizer.wrapper import Tokenizer

_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Reorders samples of token ids; rates are probabilities."""

    tokenizer: Tokenizer
    seed: int
    rate: float
    """That a document is reordered."""
    spm_rate: float
    """That a reordered text uses the SPM form."""
    fragment_rate: float | None
    """That a fragment between two `separator` tokens is reordered."""
    no_prefix: str | None
    """Text that begins with this is never reordered."""
    prefix: int
    middle: int
    suffix: int
    pad: int
    ends: frozenset[int]
    """Tokens that end a document."""
    separator: int | None

    @property
    def ids(self) -> list[int | None]:
        """Token ids that must be the same on every node."""
        return [
            *(self.prefix, self.middle, self.suffix, self.pad),
            *sorted(self.ends),
            self.separator,
        ]

    def reorder(self, sample: numpy.ndarray, index: int) -> numpy.ndarray:
        """Reorder the sample (int64) with this index in its dataset; the length does not change.

        The result is truncated or padded at its end.
        """
        # Use random.Random.random() only: it alone is guaranteed to be the same in all Python
        # versions, and the vendors' installations may differ.
        rng = random.Random(f"{self.seed} {index}")
        parts: list[numpy.ndarray] = []
        for document, end in _split_at(sample, self.ends):
            parts += [self._document(document, rng), end]
        found = numpy.concatenate(parts)[: len(sample)]
        padding = numpy.full(len(sample) - len(found), self.pad)
        return numpy.concatenate([found, padding]).astype(numpy.int64)

    def _document(self, tokens: numpy.ndarray, rng: random.Random) -> numpy.ndarray:
        if self.separator is None or self.fragment_rate is None or self.separator not in tokens:
            return self._text(tokens, self.rate, rng)
        if rng.random() >= self.rate:
            return tokens
        parts: list[numpy.ndarray] = []
        for fragment, separator in _split_at(tokens, {self.separator}):
            parts += [self._text(fragment, self.fragment_rate, rng), separator]
        return numpy.concatenate(parts)

    def _text(self, tokens: numpy.ndarray, rate: float, rng: random.Random) -> numpy.ndarray:
        if not len(tokens) or rng.random() >= rate:
            return tokens
        begin = self.tokenizer.begin
        begin = begin if tuple(tokens[: len(begin)]) == begin else ()
        text = self.tokenizer.detokenize(tokens)
        if not text or (self.no_prefix is not None and text.startswith(self.no_prefix)):
            return tokens
        first, last = sorted(int(rng.random() * (len(text) + 1)) for _ in range(2))
        prefix, middle, suffix = (
            self.tokenizer.text_ids(part) for part in (text[:first], text[first:last], text[last:])
        )
        if rng.random() < self.spm_rate:
            order = [*begin, self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            order = [*begin, self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return numpy.array(order, dtype=numpy.int64)


def _split_at(
    tokens: numpy.ndarray, ends: Collection[int]
) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
    """Split at the tokens in `ends`: (span, the end token after it); the last span has none."""
    begin = 0
    for end in map(int, numpy.flatnonzero(numpy.isin(tokens, list(ends)))):
        yield tokens[begin:end], tokens[end : end + 1]
        begin = end + 1
    yield tokens[begin:], tokens[len(tokens) :]


def fill_in_middle(args: argparse.Namespace, tokenizer: Tokenizer) -> FillInMiddle | None:
    """The transform that --fim-data asks for; None without it.

    Raises UserError if the tokenizer lacks one of the named tokens or cannot decode to text.
    """
    if not args.fim_data:
        return None
    _require_text(args, tokenizer)
    flags = [f"fim_{part}_token" for part in _TOKENS]
    if args.fim_split_sample is not None:
        flags.append("fim_split_sample")
    ids = {flag: _token_id(tokenizer, getattr(args, flag)) for flag in flags}
    if lacking := [flag for flag, found in ids.items() if found is None]:
        raise _missing_tokens(args, lacking, _token_name(tokenizer, tokenizer.eod))
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
        # hetero preprocess-data ends documents with the tokenizer's own eod.
        ends=frozenset({known["fim_eod_token"], tokenizer.eod}),
        separator=known.get("fim_split_sample"),
    )


def _require_text(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    try:
        tokenizer.detokenize(tokenizer.text_ids("text"))
    except Exception as error:
        raise UserError(
            "--fim-data needs a tokenizer that turns tokens into text and back, and "
            f"--tokenizer-type {args.tokenizer_type} does not; name one of text"
        ) from error


def _missing_tokens(args: argparse.Namespace, flags: list[str], end: str | None) -> UserError:
    named = [f"{getattr(args, flag)} (--{flag.replace('_', '-')})" for flag in flags]
    own_end = f"; its documents end with {end}" if "fim_eod_token" in flags and end else ""
    return UserError(
        f"--fim-data: the tokenizer has no token {', '.join(named)}; add what is missing with "
        f"--tokenizer-special-tokens, or name tokens that it has{own_end}"
    )


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a token; None if there is none (libraries then return the unknown token)."""
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
