"""What each tokenizer flag asks of megatron-core's tokenizers (observed, not built)."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser
from megatron.hetero.tokenizer.build import build_tokenizer, tokenizer_digest
from tests.megatron.arguments import observers as see
from tests.megatron.tokenizer.tiny_tokenizers import train_sentencepiece


def _given(flags: str) -> dict[str, Any]:
    launch: Any = SimpleNamespace(args=build_parser().parse_args(flags.split()))
    return see.core_tokenizer(launch)


@pytest.fixture
def tiktoken(tmp_path: Path) -> str:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps([{"rank": 0, "token_bytes": "YQ==", "token_str": "a"}] * 300))
    return f"--tokenizer-type TikTokenizer --tokenizer-model {path}"


def test_tiktoken_is_given_its_options(tiktoken: str) -> None:
    given = _given(tiktoken)
    assert (given["library"], given["pattern"], given["vocab_size"]) == ("tiktoken", "v2", 1300)
    assert (given["num_special_tokens"], given["special_tokens"]) == (1000, None)
    flags = f"{tiktoken} --tiktoken-pattern v1 --tiktoken-num-special-tokens 20"
    given = _given(f"{flags} --vocab-size 310 --tiktoken-special-tokens <a> <b>")
    assert (given["pattern"], given["vocab_size"]) == ("v1", 310)
    assert (given["num_special_tokens"], given["special_tokens"]) == (20, ["<a>", "<b>"])


def test_tiktoken_that_is_not_installed_is_refused(tiktoken: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="TikTokenizer needs tiktoken; run: pip install tiktoken"):
        build_tokenizer(build_parser().parse_args(tiktoken.split()))


def test_metadata_comes_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps({"chat_template": "{{ x }}", "model_type": None}))
    given = _given(f"--tokenizer-type ByteLevelTokenizer --tokenizer-metadata {path}")
    assert (given["chat_template"], given["model_type"]) == ("{{ x }}", "gpt")


def test_sentencepiece_can_keep_its_older_rules(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "tok.model"
    path.write_bytes(b"")
    monkeypatch.setattr("sentencepiece.SentencePieceProcessor.Load", lambda self, path: True)
    monkeypatch.setattr("sentencepiece.SentencePieceProcessor.eos_id", lambda self: 2)
    monkeypatch.setattr("sentencepiece.SentencePieceProcessor.pad_id", lambda self: 0)
    flags = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {path}"
    assert _given(flags)["legacy"] is False
    assert _given(f"{flags} --tokenizer-sentencepiece-legacy")["legacy"] is True


@pytest.mark.parametrize("flags", ["--tokenizer-type Llama2Tokenizer", "--tokenizer-bos on"])
def test_a_model_without_a_begin_token_is_told(tmp_path: Path, flags: str) -> None:
    model = train_sentencepiece(tmp_path / "tok", bos_id=-1)
    words = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model} {flags}"
    with pytest.raises(UserError, match=r"has no <s>, .*; give --tokenizer-bos off"):
        build_tokenizer(build_parser().parse_args(words.split()))
    args = build_parser().parse_args(f"{words} --tokenizer-bos off".split())
    assert build_tokenizer(args).begin == ()


def test_a_begin_token_is_for_sentencepiece_models() -> None:
    args = build_parser().parse_args(
        "--tokenizer-type ByteLevelTokenizer --tokenizer-bos on".split()
    )
    with pytest.raises(UserError, match="--tokenizer-bos on is for SentencePiece models"):
        build_tokenizer(args)


def test_a_prompt_begins_as_documents_do_and_text_within_one_does_not(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "tok")
    args = build_parser().parse_args(
        f"--tokenizer-type Llama2Tokenizer --tokenizer-model {model}".split()
    )
    tokenizer = build_tokenizer(args)
    assert tokenizer.tokenize("hello") == [1, *tokenizer.text_ids("hello")]
    assert 1 not in tokenizer.text_ids("hello")
    assert tokenizer.detokenize(tokenizer.tokenize("hello")) == "hello"
    plain = build_tokenizer(Namespace(**vars(args) | {"tokenizer_bos": "off"}))
    assert plain.tokenize("hello") == tokenizer.text_ids("hello")
    assert tokenizer_digest(plain) == tokenizer_digest(tokenizer)
