"""A tokenizer of each type that Megatron's flags can name."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from pathlib import Path

import sentencepiece

from hetero.errors import UserError
from megatron.training.tokenizer.core import complete, from_core
from megatron.training.tokenizer.files import (
    first_line,
    flag_value,
    huggingface_directory,
    model_of,
    read_json,
    readable_file,
    require_transformers,
)
from megatron.training.tokenizer.wrapper import Tokenizer

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
BERT_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
_BYTES = 256
_TIKTOKEN_PATTERNS = ("v1", "v2")
_TIKTOKEN_LARGEST = 2**17


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that Megatron's tokenizer flags in `args` ask for."""
    kind = getattr(args, "tokenizer_type", None)
    if kind is None:
        raise UserError("--tokenizer-type is missing; name one, for example SentencePieceTokenizer")
    if kind in SENTENCEPIECE_TYPES:
        return _build_sentencepiece(args)
    if kind == "HuggingFaceTokenizer":
        return _build_huggingface(args, huggingface_directory(model_of(args)))
    if kind == "GPT2BPETokenizer":
        return _build_gpt2(args)
    if kind in BERT_TYPES:
        return _build_bert(args)
    if kind == "TikTokenizer":
        return _build_tiktoken(args)
    if kind == "ByteLevelTokenizer":
        return _build_bytes(args)
    if kind == "NullTokenizer":
        return _build_null(args)
    known = (*SENTENCEPIECE_TYPES, "HuggingFaceTokenizer", "GPT2BPETokenizer", *BERT_TYPES)
    raise UserError(
        f"--tokenizer-type {kind} is not supported; use {', '.join(known)}, TikTokenizer, "
        "ByteLevelTokenizer or NullTokenizer"
    )


def _build_sentencepiece(args: argparse.Namespace) -> Tokenizer:
    path = readable_file(model_of(args), "--tokenizer-model")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(path)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"--tokenizer-model {path} is not a SentencePiece model or is damaged "
            f"({first_line(error)}); copy it again or train one with tools/train_tokenizer.py"
        ) from error
    core = from_core(
        args,
        "sentencepiece",
        path,
        legacy=bool(flag_value(args, "tokenizer_sentencepiece_legacy", False)),
        special_tokens=flag_value(args, "tokenizer_special_tokens"),
    )
    # In its legacy mode megatron-core knows no end-of-sentence token, though the model has one.
    return complete(core, path, eod=processor.eos_id(), pad=processor.pad_id())


def _build_huggingface(
    args: argparse.Namespace,
    directory: str,
    *,
    source: str | None = None,
    identity: dict[str, str] | None = None,
) -> Tokenizer:
    require_transformers(args.tokenizer_type)
    core = from_core(
        args,
        "huggingface",
        directory,
        source=source,
        additional_special_tokens=flag_value(args, "tokenizer_special_tokens") or [],
        use_fast=bool(flag_value(args, "tokenizer_hf_use_fast", False)),
        trust_remote_code=bool(flag_value(args, "trust_remote_code", False)),
        include_special_tokens=bool(flag_value(args, "tokenizer_hf_include_special_tokens", False)),
    )
    return complete(core, source or directory, identity=identity)


def _build_gpt2(args: argparse.Namespace) -> Tokenizer:
    """GPT-2's byte-level BPE from the two files, laid out as the directory Hugging Face reads.

    megatron-core's own loader for it asks the Hugging Face hub for `gpt2`, and takes the vocabulary
    for the merges, so it can serve neither a machine without a network nor another vocabulary.
    """
    files = {}
    for flag, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
        option = "--" + flag.replace("_", "-")
        path = flag_value(args, flag)
        if not path:
            raise UserError(f"--tokenizer-type GPT2BPETokenizer needs {option}, the {name} file")
        files[name] = os.path.abspath(readable_file(path, option))
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
        return _build_huggingface(args, directory, source=source, identity=identity)


def _build_bert(args: argparse.Namespace) -> Tokenizer:
    """BERT's word pieces from a vocabulary file; [SEP] ends a document, as it ends a sentence."""
    path = flag_value(args, "vocab_file")
    if not path:
        raise UserError(f"--tokenizer-type {args.tokenizer_type} needs --vocab-file")
    path = os.path.abspath(readable_file(path, "--vocab-file"))
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": args.tokenizer_type == "BertWordPieceLowerCase",
        "eos_token": "[SEP]",
    }
    with tempfile.TemporaryDirectory(prefix="bert-tokenizer-") as directory:
        os.symlink(path, Path(directory, "vocab.txt"))
        Path(directory, "tokenizer_config.json").write_text(json.dumps(settings))
        identity = {"tokenizer_path": args.tokenizer_type, "vocab_file": path}
        return _build_huggingface(args, directory, source=path, identity=identity)


def _build_bytes(args: argparse.Namespace) -> Tokenizer:
    """Every byte a token, and after the bytes the tokens that end and pad a document."""
    special = ["<pad>", "<eod>", *(flag_value(args, "tokenizer_special_tokens") or [])]
    # megatron-core numbers special tokens downwards from the last id.
    last = _BYTES + len(special) - 1
    core = from_core(
        args,
        "byte-level",
        None,
        vocab_size=_BYTES,
        special_tokens=special,
        _pad_id=last,
        _eos_id=last - 1,
    )
    return complete(core, "ByteLevelTokenizer")


def _build_tiktoken(args: argparse.Namespace) -> Tokenizer:
    path = readable_file(model_of(args), "--tokenizer-model")
    if importlib.util.find_spec("tiktoken") is None:
        raise UserError("--tokenizer-type TikTokenizer needs tiktoken; run: pip install tiktoken")
    pattern = flag_value(args, "tiktoken_pattern") or "v2"
    if pattern not in _TIKTOKEN_PATTERNS:
        raise UserError(f"--tiktoken-pattern {pattern} is not known to megatron-core; use v1 or v2")
    special = flag_value(args, "tiktoken_num_special_tokens", 1000)
    largest = _tiktoken_ranks(path) + special
    vocab_size = flag_value(args, "vocab_size") or min(_TIKTOKEN_LARGEST, largest)
    if vocab_size > largest:
        raise UserError(
            f"--vocab-size {vocab_size} is more than --tokenizer-model {path} holds; use at most "
            f"{largest} ({special} of them special tokens)"
        )
    core = from_core(
        args,
        "tiktoken",
        path,
        pattern=pattern,
        vocab_size=vocab_size,
        num_special_tokens=special,
        special_tokens=flag_value(args, "tokenizer_special_tokens")
        or flag_value(args, "tiktoken_special_tokens"),
    )
    return complete(core, path)


def _tiktoken_ranks(path: str) -> int:
    """How many tokens a TikTokenizer file lists; refuses what megatron-core would assert on."""
    wanted = "a JSON list of objects with rank, token_bytes and token_str"
    if not path.endswith(".json"):
        raise UserError(f"--tokenizer-model {path} must be a .json file for TikTokenizer: {wanted}")
    entries = read_json(path, "--tokenizer-model", wanted)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"--tokenizer-model {path} is not {wanted}; convert it first")
    return len(entries)


def _build_null(args: argparse.Namespace) -> Tokenizer:
    vocab_size = flag_value(args, "vocab_size")
    if not vocab_size:
        raise UserError("--tokenizer-type NullTokenizer needs --vocab-size")
    return complete(from_core(args, "null", None, vocab_size=vocab_size), "NullTokenizer")
