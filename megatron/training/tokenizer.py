"""The tokenizer of a run: megatron-core's, chosen by Megatron's flags, from local files only.

megatron-core answers a wrong file with an assertion or a traceback, and leaves some of its
tokenizers without the ids that its own datasets ask for. Here the first becomes one sentence for
the user, and the second is filled in.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import sentencepiece
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from hetero.agreement import AgreedError
from hetero.errors import UserError

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
BERT_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
_BYTES = 256
_SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog, 1234567890 times; def function(argument): return"
    " x + y\nWhere there is a will there is a way. Zwölf Boxkämpfer, 漢字 и кириллица."
)
NO_PAD = -1
"""The pad id of a tokenizer without one: what megatron-core's datasets use for 'nothing padded'."""

_TIKTOKEN_PATTERNS = ("v1", "v2")
_TIKTOKEN_LARGEST = 2**17


class Tokenizer(MegatronTokenizerBase):
    """megatron-core's tokenizer with an `eod` and a `pad` that are always ids.

    Everything else is megatron-core's own, so this object goes wherever megatron-core takes one.
    """

    def __init__(self, core: Any, *, eod: int, pad: int, identity: dict[str, str]) -> None:
        self._core = core
        self._identity = identity
        self.eod = eod
        self.pad = pad

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before `_core` is there.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._core, name)

    def tokenize(self, text: str) -> list[int]:
        return list(self._core.tokenize(text))

    def detokenize(self, ids: Any) -> str:
        """The text of token ids, given as a list, an array or a tensor."""
        plain = [int(token) for token in ids]
        if self._core.library == "tiktoken":
            # megatron-core decodes token by token and so breaks a letter that spans two tokens.
            return str(self.library_tokenizer.tokenizer.decode(plain))
        return str(self._core.detokenize(plain))

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._core.apply_chat_template(*args, **kwargs)

    @property
    def library_tokenizer(self) -> Any:
        """What megatron-core has around the library's tokenizer, which is its `tokenizer`."""
        return self._core._tokenizer

    @property
    def vocab(self) -> Any:
        return self._core.vocab

    @property
    def vocab_size(self) -> int:
        return int(self._core.vocab_size)

    @property
    def pad_id(self) -> int:
        return self.pad

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What megatron-core's datasets hash into the names of their cached indexes."""
        return OrderedDict(self._core.unique_identifiers) | self._identity


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that Megatron's tokenizer flags in `args` ask for."""
    kind = getattr(args, "tokenizer_type", None)
    if kind is None:
        raise UserError("--tokenizer-type is missing; name one, for example SentencePieceTokenizer")
    if kind in SENTENCEPIECE_TYPES:
        return _build_sentencepiece(args)
    if kind == "HuggingFaceTokenizer":
        return _build_huggingface(args, _huggingface_directory(_model_of(args)))
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


def tokenizer_digest(tokenizer: Tokenizer) -> str | None:
    """What a tokenizer makes of a fixed text, to tell apart two of one size; None if it cannot.

    The library and the file's name do not matter, the tokens do.
    """
    try:
        tokens = tokenizer.tokenize(_SAMPLE_TEXT)
    except Exception:  # one of numbers, or of bytes: its size says it all
        return None
    return hashlib.sha256(json.dumps([int(token) for token in tokens]).encode()).hexdigest()


def padded_vocab_size(vocab_size: int, *, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """The rows of the embedding: as many for every tensor-parallel rank, in a size GPUs like."""
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def embedding_rows(args: argparse.Namespace, vocab_size: int) -> int:
    """The rows of the embedding: as many as were asked for, the tokenizer's size padded elsewhere.

    A checkpoint's own rows (--use-checkpoint-args) are padded to a tensor-parallel size that does
    not divide them; --padded-vocab-size is taken as it is. Raises AgreedError for too few.
    """
    rows, split = args.padded_vocab_size, args.tensor_model_parallel_size
    if rows is None:
        return padded_vocab_size(
            vocab_size,
            make_divisible_by=args.make_vocab_size_divisible_by,
            tensor_parallel_size=split,
        )
    if args.use_checkpoint_args:
        if rows < vocab_size:
            raise AgreedError(
                f"the checkpoint has {rows} rows of vocabulary and the tokenizer {vocab_size} "
                "tokens; name the checkpoint's own with --tokenizer-type and --tokenizer-model"
            )
        return padded_vocab_size(rows, make_divisible_by=1, tensor_parallel_size=split)
    if rows < vocab_size or rows % split:
        raise AgreedError(
            f"--padded-vocab-size {rows} must be at least the tokenizer's {vocab_size} and a "
            f"multiple of --tensor-model-parallel-size {split}"
        )
    return int(rows)


def _build_sentencepiece(args: argparse.Namespace) -> Tokenizer:
    path = _readable_file(_model_of(args), "--tokenizer-model")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(path)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"--tokenizer-model {path} is not a SentencePiece model or is damaged "
            f"({_first_line(error)}); copy it again or train one with tools/train_tokenizer.py"
        ) from error
    core = _from_core(
        args,
        "sentencepiece",
        path,
        legacy=bool(_flag(args, "tokenizer_sentencepiece_legacy", False)),
        special_tokens=_flag(args, "tokenizer_special_tokens"),
    )
    # In its legacy mode megatron-core knows no end-of-sentence token, though the model has one.
    return _complete(core, path, eod=processor.eos_id(), pad=processor.pad_id())


def _build_huggingface(
    args: argparse.Namespace,
    directory: str,
    *,
    source: str | None = None,
    identity: dict[str, str] | None = None,
) -> Tokenizer:
    _require_transformers(args.tokenizer_type)
    core = _from_core(
        args,
        "huggingface",
        directory,
        source=source,
        additional_special_tokens=_flag(args, "tokenizer_special_tokens") or [],
        use_fast=bool(_flag(args, "tokenizer_hf_use_fast", False)),
        trust_remote_code=bool(_flag(args, "trust_remote_code", False)),
        include_special_tokens=bool(_flag(args, "tokenizer_hf_include_special_tokens", False)),
    )
    return _complete(core, source or directory, identity=identity)


def _build_gpt2(args: argparse.Namespace) -> Tokenizer:
    """GPT-2's byte-level BPE from the two files, laid out as the directory Hugging Face reads.

    megatron-core's own loader for it asks the Hugging Face hub for `gpt2`, and takes the vocabulary
    for the merges, so it can serve neither a machine without a network nor another vocabulary.
    """
    files = {}
    for flag, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
        option = "--" + flag.replace("_", "-")
        path = _flag(args, flag)
        if not path:
            raise UserError(f"--tokenizer-type GPT2BPETokenizer needs {option}, the {name} file")
        files[name] = os.path.abspath(_readable_file(path, option))
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
    path = _flag(args, "vocab_file")
    if not path:
        raise UserError(f"--tokenizer-type {args.tokenizer_type} needs --vocab-file")
    path = os.path.abspath(_readable_file(path, "--vocab-file"))
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
    special = ["<pad>", "<eod>", *(_flag(args, "tokenizer_special_tokens") or [])]
    # megatron-core numbers special tokens downwards from the last id.
    last = _BYTES + len(special) - 1
    core = _from_core(
        args,
        "byte-level",
        None,
        vocab_size=_BYTES,
        special_tokens=special,
        _pad_id=last,
        _eos_id=last - 1,
    )
    return _complete(core, "ByteLevelTokenizer")


def _build_tiktoken(args: argparse.Namespace) -> Tokenizer:
    path = _readable_file(_model_of(args), "--tokenizer-model")
    if importlib.util.find_spec("tiktoken") is None:
        raise UserError("--tokenizer-type TikTokenizer needs tiktoken; run: pip install tiktoken")
    pattern = _flag(args, "tiktoken_pattern") or "v2"
    if pattern not in _TIKTOKEN_PATTERNS:
        raise UserError(f"--tiktoken-pattern {pattern} is not known to megatron-core; use v1 or v2")
    special = _flag(args, "tiktoken_num_special_tokens", 1000)
    largest = _tiktoken_ranks(path) + special
    vocab_size = _flag(args, "vocab_size") or min(_TIKTOKEN_LARGEST, largest)
    if vocab_size > largest:
        raise UserError(
            f"--vocab-size {vocab_size} is more than --tokenizer-model {path} holds; use at most "
            f"{largest} ({special} of them special tokens)"
        )
    core = _from_core(
        args,
        "tiktoken",
        path,
        pattern=pattern,
        vocab_size=vocab_size,
        num_special_tokens=special,
        special_tokens=_flag(args, "tokenizer_special_tokens")
        or _flag(args, "tiktoken_special_tokens"),
    )
    return _complete(core, path)


def _tiktoken_ranks(path: str) -> int:
    """How many tokens a TikTokenizer file lists; refuses what megatron-core would assert on."""
    wanted = "a JSON list of objects with rank, token_bytes and token_str"
    if not path.endswith(".json"):
        raise UserError(f"--tokenizer-model {path} must be a .json file for TikTokenizer: {wanted}")
    entries = _read_json(path, "--tokenizer-model", wanted)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"--tokenizer-model {path} is not {wanted}; convert it first")
    return len(entries)


def _build_null(args: argparse.Namespace) -> Tokenizer:
    vocab_size = _flag(args, "vocab_size")
    if not vocab_size:
        raise UserError("--tokenizer-type NullTokenizer needs --vocab-size")
    return _complete(_from_core(args, "null", None, vocab_size=vocab_size), "NullTokenizer")


def _from_core(
    args: argparse.Namespace,
    library: str,
    path: str | None,
    *,
    source: str | None = None,
    **options: Any,
) -> Any:
    """megatron-core's tokenizer; whatever it raises becomes one sentence that names the file."""
    metadata = {"library": library, "model_type": "gpt"} | _user_metadata(args)
    try:
        return MegatronTokenizer.from_pretrained(path, metadata, **options)
    except Exception as error:
        raise UserError(
            f"{args.tokenizer_type} cannot be loaded from {source or path}: {_cause(error)}; "
            "check that the files are complete and fit --tokenizer-type"
        ) from error


def _user_metadata(args: argparse.Namespace) -> dict[str, Any]:
    path = _flag(args, "tokenizer_metadata")
    if path is None:
        return {}
    wanted = "a JSON object as megatron-core's MegatronTokenizer.write_metadata writes it"
    metadata = _read_json(
        _readable_file(path, "--tokenizer-metadata"), "--tokenizer-metadata", wanted
    )
    if not isinstance(metadata, dict):
        raise UserError(f"--tokenizer-metadata {path} is not {wanted}; write it again")
    return {key: value for key, value in metadata.items() if value is not None}


def _complete(
    core: Any,
    source: str,
    *,
    eod: int | None = None,
    pad: int | None = None,
    identity: dict[str, str] | None = None,
) -> Tokenizer:
    """Fill in the end-of-document and pad ids; without the first, documents run together."""
    found = _first_id(_core_id(core, "eod"), eod)
    if found is None:
        raise UserError(
            f"the tokenizer in {source} has no end-of-document token; use one that was trained "
            "with an end-of-sentence token, as tools/train_tokenizer.py does"
        )
    known_pad = _first_id(_core_id(core, "pad"), pad)
    return Tokenizer(
        core, eod=found, pad=NO_PAD if known_pad is None else known_pad, identity=identity or {}
    )


def _core_id(core: Any, name: str) -> Any:
    try:
        return getattr(core, name)
    except (AttributeError, NotImplementedError):
        return None


def _first_id(*candidates: Any) -> int | None:
    return next((int(id) for id in candidates if isinstance(id, int) and id >= 0), None)


def _huggingface_directory(name: str) -> str:
    """The directory of a tokenizer: as given, or where Hugging Face's cache already has it."""
    if os.path.isdir(name):
        return name
    remedy = "give a local directory, as `hf download NAME --local-dir DIR` makes one"
    if os.path.exists(name):
        raise UserError(f"--tokenizer-model {name} is a file, not a directory; {remedy}")
    _require_transformers("HuggingFaceTokenizer")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise UserError(
            f"--tokenizer-model {name} is neither a directory nor in Hugging Face's cache on this "
            f"machine; {remedy}"
        ) from error


def _require_transformers(kind: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"--tokenizer-type {kind} needs transformers; run: pip install '.[hf]'")


def _model_of(args: argparse.Namespace) -> str:
    model = _flag(args, "tokenizer_model")
    if not model:
        raise UserError(f"--tokenizer-type {args.tokenizer_type} needs --tokenizer-model")
    return str(model)


def _readable_file(path: str, flag: str) -> str:
    path = str(path)
    if os.path.isdir(path):
        raise UserError(f"{flag} {path} is a directory; give the file inside it")
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise UserError(
            f"{flag} {path} cannot be read ({error.strerror}); check the path"
        ) from error


def _read_json(path: str, flag: str, wanted: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise UserError(f"{flag} {path} is not {wanted} ({_first_line(error)})") from error


def _flag(args: argparse.Namespace, name: str, default: Any = None) -> Any:
    """A flag that a caller may not have: tools build these arguments by hand."""
    value = getattr(args, name, None)
    return default if value is None else value


def _cause(error: BaseException) -> str:
    """What a library said, without what megatron-core wrapped around it."""
    return _first_line(error.__context__ or error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__
