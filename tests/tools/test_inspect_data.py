"""What `tools/inspect_data.py` promises: what token files hold, or what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from hetero.tools.inspect_data import main
from megatron.hetero.dataset_description import Description, TokenizerInfo
from tests.megatron.token_files import build

HEADER = 34
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
"""Its end token is 100, so that it has 101 tokens."""


@pytest.fixture
def data(tmp_path) -> str:
    """Four documents of 3, 5, 1 and 0 tokens; two of them end with the end token."""
    return build(tmp_path / "data", [[[1, 2, 100]], [[5, 6], [7, 8, 100]], [[9]], [[]]])


def as_json(capsys, *flags: str) -> dict:
    assert main([*flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_says_what_the_files_hold(data, capsys):
    assert as_json(capsys, data, *NULL, "--show", "2") == {
        "prefix": data,
        "documents": 4,
        "sequences": 5,
        "tokens": 9,
        "dtype": "uint16",
        "index_bytes": HEADER + 5 * 12 + 5 * 8,
        "data_bytes": 18,
        "empty_documents": 1,
        "length_mean": 2.25,
        "length_percentiles": {
            "0": 0, "1": 0, "5": 0, "25": 0, "50": 1, "75": 3, "95": 5, "99": 5, "100": 5,
        },
        "length_histogram": [[0, 0, 1], [1, 1, 1], [2, 3, 1], [4, 7, 1]],
        "smallest_token": 1,
        "largest_token": 100,
        "last_token": 100,
        "documents_with_last_token": 2,
        "eod": 100,
        "eod_tokens": 2,
        "documents_with_eod": 2,
        "vocab_size": 101,
        "made_with": None,
        "text": ["1 2 100", "5 6 7 8 100"],
    }  # fmt: skip


def test_without_a_tokenizer_it_says_what_documents_end_with(data, capsys):
    found = as_json(capsys, data)
    assert (found["eod"], found["vocab_size"], found["text"]) == (None, None, [])
    assert (found["last_token"], found["documents_with_last_token"]) == (100, 2)


def test_it_says_which_tokenizer_made_the_files_and_refuses_another(data, capsys, refused):
    assert main([data]) == 0
    assert "made with   unknown: no description lies beside the files" in capsys.readouterr().out
    made = TokenizerInfo("SentencePieceTokenizer", 200, "abc", "tok.model")
    Path(data + ".json").write_text(Description(made, True, {}).to_json())
    assert main([data]) == 0
    said = "SentencePieceTokenizer tok.model of 200 tokens"
    assert f"made with   {said}" in capsys.readouterr().out
    error = refused(main, [data, "--tokenizer-type", "ByteLevelTokenizer"])
    assert f"{data} was made with {said}: 200 tokens and not 25" in error


def test_text_for_people(data, capsys):
    assert main([data, *NULL]) == 0
    out = capsys.readouterr().out
    for words in (
        "documents   4 (1 empty)",
        "tokens      9 of type uint16, from 1 to 100",
        "50.0 % of the documents end with the end token 100, which is 22.22 % of all tokens",
        "document 1: '5 6 7 8 100'",
        "4 to 7            1 ####",
    ):
        assert words in out


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_either_file_names_the_pair(data, capsys, suffix):
    assert as_json(capsys, data + suffix)["prefix"] == data


def test_numbers_do_not_depend_on_the_size_of_a_block(data, capsys, monkeypatch):
    whole = as_json(capsys, data, *NULL)
    for block in range(1, 10):
        monkeypatch.setattr("hetero.tools.inspect_data.BLOCK", block)
        assert as_json(capsys, data, *NULL) == whole


def test_only_the_beginning_of_a_long_document_is_shown(tmp_path, capsys):
    data = build(tmp_path / "data", [[[7] * 5000]])
    (text,) = as_json(capsys, data, *NULL)["text"]
    assert text == ("7 " * 100) + "…"


def overwritten(position: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:position] + content + raw[position + len(content) :]


@pytest.mark.parametrize(
    ("suffix", "damaged", "sentence"),
    [
        (".idx", overwritten(HEADER + 4 * 5, b"\x02"), "its numbers disagree"),
        (".idx", overwritten(HEADER + 12 * 5 + 8, b"\x09"), "its numbers disagree"),
        (".idx", lambda raw: raw + b"more", "data.idx has 138 bytes where its header speaks"),
        (".bin", lambda raw: raw + b"more", "data.bin has 22 bytes where"),
    ],
)
def test_damage_is_told_in_one_sentence(data, refused, suffix, damaged, sentence):
    path = Path(data + suffix)
    path.write_bytes(damaged(path.read_bytes()))
    assert sentence in refused(main, [data])


@pytest.mark.parametrize(
    ("documents", "dtype", "sentence"),
    [
        ([[[1] * 1000], [[101]]], numpy.uint16, "data.bin holds token 101 but the tokenizer has"),
        ([[[1, -1]]], numpy.int32, "holds token -1"),
        ([[[]], [[]]], numpy.uint16, "holds no token"),
    ],
)
def test_tokens_that_no_tokenizer_made_are_refused(
    tmp_path, refused, monkeypatch, documents, dtype, sentence
):
    monkeypatch.setattr("hetero.tools.inspect_data.BLOCK", 64)
    data = build(tmp_path / "data", documents, dtype=dtype)
    assert sentence in refused(main, [data, *NULL])


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, data, refused):
    model = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{tmp_path}/no"]
    assert f"{tmp_path}/no cannot be read" in refused(main, [data, *model])
