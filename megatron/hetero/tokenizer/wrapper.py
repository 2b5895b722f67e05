"""megatron-core's tokenizer with the ids that its datasets need."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import OrderedDict
from typing import Any

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

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
