"""Rules of the sources of data and of the tokenizer."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from hetero.errors import UserError
from megatron.hetero.arguments.flags_data import TOKENIZERS
from megatron.hetero.arguments.rules import Note, Values, Verdict, flag_of, rule

# The default of Megatron's pretrain_gpt.py.
DEFAULT_TOKENIZER = "GPT2BPETokenizer"
SPLITS = ("train", "valid", "test")
_SPLIT_PATHS = " ".join(f"{split}_data_path" for split in SPLITS)
_TOKENIZER_FILES = " ".join({name: None for names in TOKENIZERS.values() for name in names})
# A socket's path has at most 107 bytes, of which Python's multiprocessing adds 32.
_LONGEST_TEMPORARY_FOLDER = 75

# Megatron's default for --data-path without --split.
DEFAULT_SPLIT = "969, 30, 1"


@rule("data_args_path", sets="data_path")
def _blend(args: Namespace) -> Verdict:
    """--data-args-path replaces --data-path."""
    if args.data_args_path is None:
        return {"data_path": args.data_path}
    if args.data_path is not None:
        yield "--data-path and --data-args-path exclude each other; remove one"
        return {"data_path": args.data_path}
    return {"data_path": _read_text(args.data_args_path, "--data-args-path").split()}


@rule("per_split_data_args_path", sets=_SPLIT_PATHS)
def _blends_of_splits(args: Namespace) -> Verdict:
    """--per-split-data-args-path replaces --train-data-path and its like."""
    given = {f"{split}_data_path": getattr(args, f"{split}_data_path") for split in SPLITS}
    if args.per_split_data_args_path is None:
        return given
    for name, words in given.items():
        if words is not None:
            yield f"{flag_of(name)} and --per-split-data-args-path exclude each other; remove one"
            return given
    lists = _read_split_lists(args.per_split_data_args_path)
    return {f"{split}_data_path": lists.get(split) for split in SPLITS}


def _read_split_lists(path: str) -> dict[str, list[str]]:
    """The words of each split. Raises UserError."""
    flag = "--per-split-data-args-path"
    expected = f"a JSON object with a list of words under each of {', '.join(SPLITS)}"
    try:
        lists = json.loads(_read_text(path, flag))
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} {path} is not {expected} ({error})") from None
    if not isinstance(lists, dict) or not set(lists) <= set(SPLITS):
        raise UserError(f"{flag} {path} is not {expected}")
    # As in Megatron, a list may also be one text of words.
    given = {
        split: words.split() if isinstance(words, str) else words
        for split, words in lists.items()
        if words is not None
    }
    for words in given.values():
        if not isinstance(words, list) or not all(isinstance(w, str | int | float) for w in words):
            raise UserError(f"{flag} {path} is not {expected}")
    return {split: [str(word) for word in words] for split, words in given.items()}


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{flag} {path} cannot be read ({reason}); check the path") from None


@rule(f"data_path {_SPLIT_PATHS} mock_data skip_train", sets="split")
def _source(args: Namespace) -> Verdict:
    """One source of data, of which the training split is not empty."""
    per_split = {f"--{split}-data-path": getattr(args, f"{split}_data_path") for split in SPLITS}
    lists = {"--data-path": args.data_path, **per_split}
    given = [flag for flag, words in lists.items() if words is not None]
    for flag in given:
        yield from check_blend(flag, lists[flag])
    sources = [
        *(["--mock-data"] if args.mock_data else []),
        *(["--data-path"] if args.data_path is not None else []),
        *[flag for flag in given if flag in per_split][:1],
    ]
    if not sources:
        yield "no data is named; add --data-path or --mock-data"
        return {}
    if len(sources) > 1:
        yield f"{' and '.join(sources)} exclude each other; keep one source of data"
        return {}
    split = args.split
    if split is not None and sources[0] in per_split:
        yield f"--split cannot go with {sources[0]}; remove it"
    if args.data_path is not None and split is None:
        split = DEFAULT_SPLIT
    if split is not None:
        shares = check_split(split)
        if not shares[0] and not args.skip_train:
            yield f"--split {split!r} leaves nothing to train on; raise its first share"
    if sources[0] in per_split and args.train_data_path is None and not args.skip_train:
        yield "nothing is named to train on; add --train-data-path or --skip-train"
    return {"split": split}


@rule("num_workers")
def _workers(args: Namespace) -> Iterator[str]:
    folder = tempfile.gettempdir()
    if args.num_workers and len(os.fsencode(folder)) > _LONGEST_TEMPORARY_FOLDER:
        yield (
            f"the path of temporary files, {folder}, is too long for the sockets of --num-workers "
            f"{args.num_workers}; set TMPDIR to one of at most {_LONGEST_TEMPORARY_FOLDER} bytes, "
            "or give --num-workers 0"
        )


def check_blend(flag: str, words: list[str]) -> Iterator[str]:
    """Errors in a list of prefixes, or of alternating weights and prefixes.

    megatron-core reads any list of an even length as weights and prefixes if every other word is a
    number, so a mixture of both forms would train on the wrong data.
    """
    if not words or not all(word.strip() for word in words):
        yield f"{flag} names no file; give at least one prefix"
        return
    weights = [_weight(word) for word in words[::2]]
    if len(words) == 1 or all(_weight(word) is None for word in words):
        return
    if len(words) % 2 or any(weight is None for weight in weights):
        yield (
            f"{flag} mixes weights and prefixes; give a weight before every prefix, or none at all"
        )
        return
    numbers = [weight for weight in weights if weight is not None]
    if any(not math.isfinite(weight) or weight <= 0 for weight in numbers):
        yield f"the weights of {flag} must be numbers above 0; leave out what is not to be read"


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def check_split(split: str) -> list[float]:
    """Parse up to three shares, such as '99,1,0'. megatron-core accepts any text with digits.

    Raises UserError.
    """
    shares = [_weight(share) for share in re.split(r"\s*[,/]\s*|\s+", split.strip())]
    numbers = [share for share in shares if share is not None]
    are_shares = all(math.isfinite(share) and share >= 0 for share in numbers)
    is_list = len(numbers) == len(shares) <= len(SPLITS)
    if not is_list or not are_shares or not sum(numbers):
        raise UserError(
            f"--split {split!r} must be up to three shares for train, valid and test that are not "
            "all 0, such as 99,1,0"
        )
    return numbers


@rule(_TOKENIZER_FILES, sets="tokenizer_type")
def _tokenizer(args: Namespace) -> Verdict:
    kind = args.tokenizer_type or DEFAULT_TOKENIZER
    needs = [name for name in TOKENIZERS[kind] if getattr(args, name) is None]
    if needs:
        yield f"--tokenizer-type {kind} needs {' and '.join(map(flag_of, needs))}; add it"
    return {"tokenizer_type": kind}


@rule(sets="dataloader_type")
def _dataloader(args: Namespace) -> Values:
    return {"dataloader_type": args.dataloader_type or "single"}


@rule("padded_vocab_size vocab_size")
def _padded_vocabulary(args: Namespace) -> Iterator[str]:
    if (
        args.padded_vocab_size is not None
        and args.vocab_size is not None
        and args.padded_vocab_size < args.vocab_size
    ):
        yield (
            f"--padded-vocab-size {args.padded_vocab_size} must be at least --vocab-size "
            f"{args.vocab_size}"
        )


@rule("fim_data typed_flags")
def _idle_fim(args: Namespace) -> Iterator[str]:
    idle = [flag for flag in args.typed_flags if flag.startswith("--fim-")]
    if idle and not args.fim_data:
        yield Note(f"{', '.join(idle)}: nothing is asked for without --fim-data")


@rule("fim_data mock_data")
def _fim_source(args: Namespace) -> Iterator[str]:
    if args.fim_data and args.mock_data:
        yield "--fim-data needs text, which --mock-data has not; use --data-path"


@rule("fim_data tokenizer_type")
def _fim_tokenizer(args: Namespace) -> Iterator[str]:
    if args.fim_data and args.tokenizer_type == "NullTokenizer":
        yield "--fim-data needs text, which a NullTokenizer has not; use another --tokenizer-type"


@rule("fim_data fim_split_sample fim_fragment_rate")
def _fim_fragments(args: Namespace) -> Iterator[str]:
    if not args.fim_data:
        return
    if args.fim_split_sample is not None and args.fim_fragment_rate is None:
        yield "--fim-split-sample needs --fim-fragment-rate; add it"
    elif args.fim_split_sample is None and args.fim_fragment_rate is not None:
        yield Note("--fim-fragment-rate: it needs --fim-split-sample")


@rule("fim_data fim_prefix_token fim_middle_token fim_suffix_token")
def _fim_tokens(args: Namespace) -> Iterator[str]:
    parts = ("prefix", "middle", "suffix")
    names = [getattr(args, f"fim_{part}_token") for part in parts]
    if args.fim_data and len(set(names)) < len(names):
        yield (
            f"{', '.join(f'--fim-{part}-token' for part in parts)} are {', '.join(names)}; name "
            "three different tokens"
        )


DATA_RULES = (
    _blend,
    _blends_of_splits,
    _source,
    _workers,
    _tokenizer,
    _dataloader,
    _padded_vocabulary,
    _idle_fim,
    _fim_source,
    _fim_tokenizer,
    _fim_fragments,
    _fim_tokens,
)
