"""Writes a checkpoint's tokenizer in Hugging Face's format, whatever its --tokenizer-type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from megatron.hetero.huggingface import hub_folders
from megatron.hetero.huggingface.configuration import read_json
from megatron.hetero.huggingface.sentencepiece_model import write_sentencepiece
from megatron.hetero.huggingface.token_ids import SPECIAL, read_token_ids
from megatron.hetero.tokenizer.files import copy_file, own_folder, own_tokenizer

GENERATION_CONFIG = "generation_config.json"
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_CLASSES: Mapping[str, Mapping[str, Any]] = {
    "GPT2BPETokenizer": {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"},
    "BertWordPieceLowerCase": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
    "BertWordPieceCase": {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
}
"""tokenizer_config.json of the types whose files transformers reads unchanged."""
_FILE_NAMES = {"vocab_file": ("vocab.json", "vocab.txt"), "merge_file": ("merges.txt",)}


@dataclass(frozen=True)
class ExportedTokenizer:
    """The outcome of writing a tokenizer."""

    special: Mapping[str, Any] = field(default_factory=dict)
    """The ids of special tokens, as config.json names them."""
    problem: str | None = None
    """Why no tokenizer was written."""
    note: str | None = None
    """What the written tokenizer lacks."""


@dataclass(frozen=True)
class TokenizerSource:
    """The tokenizer of a checkpoint, or one named instead of it."""

    kind: str | None
    """--tokenizer-type."""
    files: Mapping[str, str]
    """The flags that name its files."""
    folder: Path | None = None
    """The folder of Hugging Face's format that holds it."""
    special_tokens: tuple[str, ...] = ()
    """--tokenizer-special-tokens, which a SentencePiece model takes only in its legacy mode."""

    @classmethod
    def of_checkpoint(cls, args: Mapping[str, Any], checkpoint: Path) -> TokenizerSource:
        """The checkpoint's copy, or else the files that its arguments name."""
        names = ("tokenizer_model", "vocab_file", "merge_file")
        named = {name: str(args[name]) for name in names if args.get(name)}
        named |= own_tokenizer(args, checkpoint)
        kind = args.get("tokenizer_type")
        folder = None
        if kind in ("HuggingFaceTokenizer", None):
            candidates = [own_folder(args, checkpoint), Path(named.get("tokenizer_model") or "-")]
            folder = next((path for path in candidates if path and path.is_dir()), None)
        special = tuple(args.get("tokenizer_special_tokens") or ())
        return cls(kind, named, folder, special)

    @classmethod
    def of_path(cls, path: Path) -> TokenizerSource:
        """A folder of Hugging Face's format, or a SentencePiece model. Raises UserError."""
        if path.is_file():
            return cls("SentencePieceTokenizer", {"tokenizer_model": str(path)})
        if not hub_folders.has_tokenizer(path):
            raise UserError(
                f"--tokenizer {path} is neither a folder with a tokenizer of Hugging Face's format "
                "nor a SentencePiece model"
            )
        return cls("HuggingFaceTokenizer", {}, path)

    def config(self) -> dict[str, Any]:
        """config.json of the model that the tokenizer comes from; empty if it has none."""
        if self.folder is None or not (self.folder / hub_folders.CONFIG).is_file():
            return {}
        return read_json(self.folder / hub_folders.CONFIG)

    def write(self, target: Path) -> ExportedTokenizer:
        """Write tokenizer and generation settings into a model's folder."""
        problem = None
        if self.folder is not None:
            hub_folders.copy_companions(self.folder, target, besides=(hub_folders.CONFIG,))
            if not hub_folders.has_tokenizer(target):
                problem = _absent(None)
        elif self.kind in (*_SENTENCEPIECE, *_CLASSES):
            absent = [path for path in self.files.values() if not Path(path).is_file()]
            if absent or not self.files:
                problem = _absent(absent[0] if absent else None)
            else:
                problem = self._write_converted(target)
        elif self.kind == "HuggingFaceTokenizer":
            problem = _absent(self.files.get("tokenizer_model"))
        else:
            problem = f"transformers has none like {self.kind or 'it'}"
        special = dict(read_token_ids(target).special) | _special_ids(self.config())
        if special and not (target / GENERATION_CONFIG).exists():
            (target / GENERATION_CONFIG).write_text(json.dumps(special, indent=2) + "\n")
        note = None
        if self.folder is not None and self.special_tokens:
            note = (
                "the tokenizer that was written does not have the tokens of "
                f"--tokenizer-special-tokens ({' '.join(self.special_tokens)}); add them with "
                "transformers' add_special_tokens"
            )
        return ExportedTokenizer(special, problem, note)

    def _write_converted(self, target: Path) -> str | None:
        """Convert a tokenizer of another type than Hugging Face's; returns why it cannot."""
        if self.kind in _SENTENCEPIECE:
            model = Path(self.files["tokenizer_model"])
            return write_sentencepiece(model, target, special_tokens=self.special_tokens)
        for flag, names in _FILE_NAMES.items():
            if flag in self.files:
                suffix = ".txt" if str(self.kind).startswith("Bert") else ".json"
                name = next((n for n in names if n.endswith(suffix)), names[0])
                copy_file(Path(self.files[flag]), target / name)
        config = json.dumps(_CLASSES[str(self.kind)], indent=2)
        (target / "tokenizer_config.json").write_text(config + "\n")
        return None


def _absent(path: str | None) -> str:
    what = "the checkpoint names none" if path is None else f"{path} is not there"
    return f"{what}; name it with --tokenizer"


def _special_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    names = [f"{kind}_token_id" for kind in SPECIAL]
    return {name: config[name] for name in names if config.get(name) is not None}
