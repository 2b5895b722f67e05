"""Builds the tokenizer of each type that Megatron's flags can name, by megatron-core.

If a file is wrong, megatron-core raises an assertion or an error of a library, and some of its
tokenizers lack ids that its own datasets need. Here the first becomes a UserError, and the ids are
filled in.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from hetero.errors import UserError
from megatron.hetero.core_private import null_tokenizer
from megatron.hetero.tokenizer.files import (
    first_line,
    flag_value,
    huggingface_directory,
    read_json,
    require_readable_file,
    require_transformers,
    required_flag,
)

NO_PAD = -1
"""The pad id of a tokenizer without one: megatron-core's datasets then pad nothing."""
_SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog, 1234567890 times; def function(argument): return"
    " x + y\nWhere there is a will there is a way. Zwölf Boxkämpfer, 漢字 и кириллица."
)


class Tokenizer(MegatronTokenizerBase):
    """megatron-core's tokenizer whose `eod` and `pad` are always ids.

    All else is delegated to megatron-core's, so it can be used wherever megatron-core takes one.
    """

    def __init__(
        self,
        core: Any,
        *,
        eod: int,
        pad: int,
        identity: dict[str, str],
        begin: tuple[int, ...] = (),
    ) -> None:
        """`begin` are the tokens in front of each document: <s> or none."""
        self._core = core
        self.begin = begin
        self._identity = identity
        self.eod = eod
        self.pad = pad

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks up attributes before `_core` is set.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._core, name)

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a document, or of the prompt that begins one."""
        return [*self.begin, *self.text_ids(text)]

    def text_ids(self, text: str) -> list[int]:
        """The tokens of text anywhere in a document."""
        return list(self._core.tokenize(text))

    def detokenize(self, ids: Any) -> str:
        """The text of token ids, given as a list, an array or a tensor."""
        plain = [int(token) for token in ids]
        if self._core.library == "tiktoken":
            # megatron-core decodes token by token, which breaks a letter that spans two tokens.
            return str(self.library_tokenizer.tokenizer.decode(plain))
        if self._core.library == "byte-level":
            # megatron-core strips white space at the end, which is part of the text.
            return bytes(token for token in plain if token < 256).decode(errors="ignore")
        return str(self._core.detokenize(plain))

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._core.apply_chat_template(*args, **kwargs)

    @property
    def library_tokenizer(self) -> Any:
        """megatron-core's wrapper of the library's own tokenizer, its `tokenizer`."""
        return self._core._tokenizer

    @property
    def vocab(self) -> Any:
        return self._core.vocab

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: ids of added tokens may leave a gap."""
        size = int(self._core.vocab_size)
        if self._core.library != "huggingface":
            return size
        return max(size, 1 + max(self.library_tokenizer.tokenizer.get_vocab().values(), default=-1))

    @property
    def base_vocab_size(self) -> int:
        """The tokens without those that were added to a tokenizer of Hugging Face's format."""
        if self._core.library != "huggingface":
            return self.vocab_size
        return int(self.library_tokenizer.tokenizer.vocab_size)

    @property
    def pad_id(self) -> int:
        return self.pad

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Hashed by megatron-core's datasets into the names of their cached indexes."""
        return OrderedDict(self._core.unique_identifiers) | self._identity


def tokenizer_digest(tokenizer: Tokenizer) -> str | None:
    """A SHA-256 of the tokens of a fixed text, to tell apart two tokenizers of one size.

    It does not depend on the library, the file's name or what documents begin with. None if the
    text cannot be tokenized.
    """
    try:
        tokens = tokenizer.text_ids(_SAMPLE_TEXT)
    except Exception:  # NullTokenizer, which its size defines
        return None
    return hashlib.sha256(json.dumps([int(token) for token in tokens]).encode()).hexdigest()


def load_core_tokenizer(
    args: argparse.Namespace,
    library: str,
    path: str | None,
    *,
    source: str | None = None,
    **options: Any,
) -> Any:
    """megatron-core's tokenizer of a library, from its file. Raises UserError.

    Args:
        source: what an error names instead of `path`.
        options: for megatron-core's own constructor.
    """
    metadata = {"library": library, "model_type": "gpt"} | _user_metadata(args)
    try:
        return MegatronTokenizer.from_pretrained(path, metadata, **options)
    except Exception as error:
        raise UserError(
            f"{args.tokenizer_type} cannot be loaded from {source or path}: {_cause(error)}; "
            "check that the files are complete and fit --tokenizer-type"
        ) from error


def wrap_core_tokenizer(
    core: Any,
    source: str,
    *,
    eod: int | None = None,
    pad: int | None = None,
    identity: dict[str, str] | None = None,
    begin: tuple[int, ...] = (),
) -> Tokenizer:
    """A tokenizer that has megatron-core's end-of-document and pad ids, or else `eod` and `pad`.

    Raises UserError if there is no end-of-document id, because documents would run together.
    `source` is what an error names, `identity` part of the tokenizer's `unique_identifiers`.
    """
    eod_id = _first_id(_core_id(core, "eod"), eod)
    if eod_id is None:
        raise UserError(
            f"the tokenizer in {source} has no end-of-document token; use one that was trained "
            "with an end-of-sentence token, as hetero train-tokenizer does"
        )
    pad_id = _first_id(_core_id(core, "pad"), pad)
    return Tokenizer(
        core,
        eod=eod_id,
        pad=NO_PAD if pad_id is None else pad_id,
        identity=identity or {},
        begin=begin,
    )


def _user_metadata(args: argparse.Namespace) -> dict[str, Any]:
    """The values in the file of --tokenizer-metadata."""
    path = flag_value(args, "tokenizer_metadata")
    if path is None:
        return {}
    flag = "--tokenizer-metadata"
    expected = "a JSON object as megatron-core's MegatronTokenizer.write_metadata writes it"
    metadata = read_json(require_readable_file(path, flag), flag, expected)
    if not isinstance(metadata, dict):
        raise UserError(f"{flag} {path} is not {expected}; write it again")
    return {key: value for key, value in metadata.items() if value is not None}


def _core_id(core: Any, name: str) -> Any:
    """A special token's id of megatron-core's tokenizer; None if it does not define one."""
    try:
        return getattr(core, name)
    except (AttributeError, NotImplementedError):
        return None


def _first_id(*candidates: Any) -> int | None:
    """The first candidate that is an id; libraries use negative numbers for none."""
    return next((int(id) for id in candidates if isinstance(id, int) and id >= 0), None)


def _cause(error: BaseException) -> str:
    """The library's message, without that of megatron-core's error around it."""
    return first_line(error.__context__ or error)


WITH_BOS = "Llama2Tokenizer"
"""The type whose class in Megatron-LM begins each document with <s>."""
_NUM_BYTES = 256
_TIKTOKEN_PATTERNS = ("v1", "v2")
_TIKTOKEN_MAX_SIZE = 2**17


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Build a tokenizer by Megatron's flags; those that a tool does not have may be absent.

    Raises UserError.
    """
    kind = getattr(args, "tokenizer_type", None)
    if kind is None:
        raise UserError("--tokenizer-type is missing; name one, for example SentencePieceTokenizer")
    if kind not in _BUILDERS:
        *types, last = _BUILDERS
        raise UserError(
            f"--tokenizer-type {kind} is not supported; use {', '.join(types)} or {last}"
        )
    builder = _BUILDERS[kind]
    if flag_value(args, "tokenizer_bos") == "on" and builder is not _build_sentencepiece:
        raise UserError(
            f"--tokenizer-bos on is for SentencePiece models; --tokenizer-type {kind} has none; "
            "remove it"
        )
    return builder(args)


def _build_sentencepiece(args: argparse.Namespace) -> Tokenizer:
    path = require_readable_file(required_flag(args, "tokenizer_model"), "--tokenizer-model")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(path)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"--tokenizer-model {path} is not a SentencePiece model or is damaged "
            f"({first_line(error)}); copy it again or train one with hetero train-tokenizer"
        ) from error
    is_legacy = bool(flag_value(args, "tokenizer_sentencepiece_legacy", False))
    special = flag_value(args, "tokenizer_special_tokens")
    if special and not is_legacy:
        raise UserError(
            "--tokenizer-special-tokens adds tokens to a SentencePiece model only with "
            "--tokenizer-sentencepiece-legacy; add it, or train a model that has them"
        )
    core = load_core_tokenizer(
        args, "sentencepiece", path, legacy=is_legacy, special_tokens=special
    )
    # In legacy mode megatron-core's has no end-of-sentence token, though the model has one.
    return wrap_core_tokenizer(
        core,
        path,
        eod=processor.eos_id(),
        pad=processor.pad_id(),
        begin=_begin(args, processor.bos_id(), path),
    )


def _begin(args: argparse.Namespace, bos: int, path: str) -> tuple[int, ...]:
    """What each document begins with."""
    chosen = flag_value(args, "tokenizer_bos", "auto")
    if chosen == "off" or (chosen == "auto" and args.tokenizer_type != WITH_BOS):
        return ()
    if bos < 0:
        asks = "--tokenizer-bos on" if chosen == "on" else f"--tokenizer-type {WITH_BOS}"
        raise UserError(
            f"--tokenizer-model {path} has no <s>, with which {asks} begins each document; give "
            "--tokenizer-bos off"
        )
    return (bos,)


def _build_huggingface(args: argparse.Namespace) -> Tokenizer:
    directory = huggingface_directory(str(required_flag(args, "tokenizer_model")))
    return _build_from_directory(args, directory)


def _build_from_directory(
    args: argparse.Namespace,
    directory: str,
    *,
    source: str | None = None,
    identity: dict[str, str] | None = None,
) -> Tokenizer:
    require_transformers(args.tokenizer_type)
    core = load_core_tokenizer(
        args,
        "huggingface",
        directory,
        source=source,
        additional_special_tokens=flag_value(args, "tokenizer_special_tokens") or [],
        use_fast=bool(flag_value(args, "tokenizer_hf_use_fast", False)),
        trust_remote_code=bool(flag_value(args, "trust_remote_code", False)),
        include_special_tokens=bool(flag_value(args, "tokenizer_hf_include_special_tokens", False)),
    )
    return wrap_core_tokenizer(core, source or directory, identity=identity)


def _build_gpt2(args: argparse.Namespace) -> Tokenizer:
    """GPT-2's byte-level BPE, from a directory of Hugging Face's format with links to its files.

    megatron-core's own loader downloads `gpt2` from the Hugging Face hub and confuses vocabulary
    and merges, so that it works neither without a network nor with another vocabulary.
    """
    files = {}
    for flag, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
        path = require_readable_file(required_flag(args, flag), f"--{flag.replace('_', '-')}")
        files[name] = os.path.abspath(path)
    with tempfile.TemporaryDirectory(prefix="gpt2-tokenizer-") as directory:
        for name, path in files.items():
            os.symlink(path, Path(directory, name))
        Path(directory, "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        identity = {
            "tokenizer_path": "GPT2BPETokenizer",
            "vocab_file": files["vocab.json"],
            "merges_file": files["merges.txt"],
        }
        source = f"{files['vocab.json']} and {files['merges.txt']}"
        return _build_from_directory(args, directory, source=source, identity=identity)


def _build_bert(args: argparse.Namespace) -> Tokenizer:
    """BERT's word pieces from a vocabulary file. [SEP], which ends a sentence, ends a document."""
    path = os.path.abspath(require_readable_file(required_flag(args, "vocab_file"), "--vocab-file"))
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": args.tokenizer_type == "BertWordPieceLowerCase",
        "eos_token": "[SEP]",
    }
    with tempfile.TemporaryDirectory(prefix="bert-tokenizer-") as directory:
        os.symlink(path, Path(directory, "vocab.txt"))
        Path(directory, "tokenizer_config.json").write_text(json.dumps(settings))
        identity = {"tokenizer_path": args.tokenizer_type, "vocab_file": path}
        return _build_from_directory(args, directory, source=path, identity=identity)


def _build_byte_level(args: argparse.Namespace) -> Tokenizer:
    """A token for each byte value, then special tokens, the last two of which end and pad."""
    special = ["<pad>", "<eod>", *(flag_value(args, "tokenizer_special_tokens") or [])]
    # megatron-core numbers special tokens downwards from the last id.
    last = _NUM_BYTES + len(special) - 1
    core = load_core_tokenizer(
        args,
        "byte-level",
        None,
        vocab_size=_NUM_BYTES,
        special_tokens=special,
        _pad_id=last,
        _eos_id=last - 1,
    )
    return wrap_core_tokenizer(core, "ByteLevelTokenizer")


def _build_tiktoken(args: argparse.Namespace) -> Tokenizer:
    path = require_readable_file(required_flag(args, "tokenizer_model"), "--tokenizer-model")
    if importlib.util.find_spec("tiktoken") is None:
        raise UserError("--tokenizer-type TikTokenizer needs tiktoken; run: pip install tiktoken")
    pattern = flag_value(args, "tiktoken_pattern") or "v2"
    if pattern not in _TIKTOKEN_PATTERNS:
        raise UserError(f"--tiktoken-pattern {pattern} is not known to megatron-core; use v1 or v2")
    special = flag_value(args, "tiktoken_num_special_tokens", 1000)
    max_size = _tiktoken_size(path) + special
    vocab_size = flag_value(args, "vocab_size") or min(_TIKTOKEN_MAX_SIZE, max_size)
    if vocab_size > max_size:
        raise UserError(
            f"--vocab-size {vocab_size} is more than --tokenizer-model {path} holds; use at most "
            f"{max_size} ({special} of them special tokens)"
        )
    core = load_core_tokenizer(
        args,
        "tiktoken",
        path,
        pattern=pattern,
        vocab_size=vocab_size,
        num_special_tokens=special,
        special_tokens=flag_value(args, "tokenizer_special_tokens")
        or flag_value(args, "tiktoken_special_tokens"),
    )
    return wrap_core_tokenizer(core, path)


def _tiktoken_size(path: str) -> int:
    """The number of tokens in a TikTokenizer file. megatron-core would assert on a wrong one."""
    expected = "a JSON list of objects with rank, token_bytes and token_str"
    if not path.endswith(".json"):
        raise UserError(
            f"--tokenizer-model {path} must be a .json file for TikTokenizer: {expected}"
        )
    entries = read_json(path, "--tokenizer-model", expected)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"--tokenizer-model {path} is not {expected}; convert it first")
    return len(entries)


def _build_null(args: argparse.Namespace) -> Tokenizer:
    library, options = null_tokenizer(required_flag(args, "vocab_size"))
    core = load_core_tokenizer(args, library, None, **options)
    return wrap_core_tokenizer(core, "NullTokenizer")


_BUILDERS: Mapping[str, Callable[[argparse.Namespace], Tokenizer]] = {
    "SentencePieceTokenizer": _build_sentencepiece,
    "GPTSentencePieceTokenizer": _build_sentencepiece,
    "Llama2Tokenizer": _build_sentencepiece,
    "HuggingFaceTokenizer": _build_huggingface,
    "GPT2BPETokenizer": _build_gpt2,
    "BertWordPieceLowerCase": _build_bert,
    "BertWordPieceCase": _build_bert,
    "TikTokenizer": _build_tiktoken,
    "ByteLevelTokenizer": _build_byte_level,
    "NullTokenizer": _build_null,
}
"""The builder of each --tokenizer-type."""
