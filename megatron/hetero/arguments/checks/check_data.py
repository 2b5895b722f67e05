"""Checks of the sources of data and of the tokenizer."""

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

# The default of Megatron's pretrain_gpt.py.
DEFAULT_TOKENIZER = "GPT2BPETokenizer"
SPLITS = ("train", "valid", "test")
# A socket's path has at most 107 bytes, of which Python's multiprocessing adds 32.
_LONGEST_TEMPORARY_FOLDER = 75

# Megatron's default for --data-path without --split.
DEFAULT_SPLIT = "969, 30, 1"


def check_data(args: Namespace) -> tuple[Iterator[str], ...]:
    return (
        _read_lists(args),
        _check_source(args),
        _check_workers(args),
        _check_tokenizer(args),
        _check_fim_absence(args),
        _check_fim_text(args),
        _check_fim_fragments(args),
        _check_fim_tokens(args),
    )


def _read_lists(args: Namespace) -> Iterator[str]:
    """Read --data-args-path and --per-split-data-args-path into the flags that they replace."""
    if args.data_args_path is not None:
        if args.data_path is not None:
            yield "--data-path and --data-args-path exclude each other; remove one"
            return
        # Unknowable rather than absent, if the file cannot be read.
        del args.data_path
        args.data_path = _read_text(args.data_args_path, "--data-args-path").split()
    if args.per_split_data_args_path is None:
        return
    for split in SPLITS:
        if getattr(args, f"{split}_data_path") is not None:
            yield (
                f"--{split}-data-path and --per-split-data-args-path exclude each other; remove one"
            )
            return
    for split in SPLITS:
        delattr(args, f"{split}_data_path")
    lists = _read_split_lists(args.per_split_data_args_path)
    for split in SPLITS:
        setattr(args, f"{split}_data_path", lists.get(split))


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


def _check_source(args: Namespace) -> Iterator[str]:
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
        return
    if len(sources) > 1:
        yield f"{' and '.join(sources)} exclude each other; keep one source of data"
        return
    if args.split is not None and sources[0] in per_split:
        yield f"--split cannot go with {sources[0]}; remove it"
    if args.data_path is not None and args.split is None:
        args.split = DEFAULT_SPLIT
    if args.split is not None:
        shares = check_split(args.split)
        if not shares[0] and not args.skip_train:
            yield (f"--split {args.split!r} leaves nothing to train on; raise its first share")
    if sources[0] in per_split and args.train_data_path is None and not args.skip_train:
        yield "nothing is named to train on; add --train-data-path or --skip-train"


def _check_workers(args: Namespace) -> Iterator[str]:
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


def _check_tokenizer(args: Namespace) -> Iterator[str]:
    args.tokenizer_type = args.tokenizer_type or DEFAULT_TOKENIZER
    args.dataloader_type = args.dataloader_type or "single"
    needs = [name for name in TOKENIZERS[args.tokenizer_type] if getattr(args, name) is None]
    if needs:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in needs)
        yield f"--tokenizer-type {args.tokenizer_type} needs {flags}; add it"
    if (
        args.padded_vocab_size is not None
        and args.vocab_size is not None
        and args.padded_vocab_size < args.vocab_size
    ):
        yield (
            f"--padded-vocab-size {args.padded_vocab_size} must be at least --vocab-size "
            f"{args.vocab_size}"
        )


def _check_fim_absence(args: Namespace) -> Iterator[str]:
    idle = [flag for flag in args.typed_flags if flag.startswith("--fim-")]
    if idle and not args.fim_data:
        args.ignored_flags.append(f"{', '.join(idle)}: nothing is asked for without --fim-data")
    yield from ()


def _check_fim_text(args: Namespace) -> Iterator[str]:
    if not args.fim_data:
        return
    if args.mock_data:
        yield "--fim-data needs text, which --mock-data has not; use --data-path"
    if args.tokenizer_type == "NullTokenizer":
        yield "--fim-data needs text, which a NullTokenizer has not; use another --tokenizer-type"


def _check_fim_fragments(args: Namespace) -> Iterator[str]:
    if not args.fim_data:
        return
    if args.fim_split_sample is not None and args.fim_fragment_rate is None:
        yield "--fim-split-sample needs --fim-fragment-rate; add it"
    elif args.fim_split_sample is None and args.fim_fragment_rate is not None:
        args.ignored_flags.append("--fim-fragment-rate: it needs --fim-split-sample")


def _check_fim_tokens(args: Namespace) -> Iterator[str]:
    if not args.fim_data:
        return
    flags = ("prefix", "middle", "suffix")
    names = [getattr(args, f"fim_{part}_token") for part in flags]
    if len(set(names)) < len(names):
        yield (
            f"{', '.join(f'--fim-{part}-token' for part in flags)} are {', '.join(names)}; name "
            "three different tokens"
        )
