"""Which tokens a tokenizer has, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.hetero.huggingface.token_ids import read_token_ids, tokens_without_row


def _write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_added_tokens_of_every_file_are_known(tmp_path: Path) -> None:
    _write(
        tmp_path,
        vocab={"a": 0, "b": 1},
        added_tokens={"<pad>": 2},
        tokenizer_config={
            "added_tokens_decoder": {"7": {"content": "<end>", "special": True}},
            "eos_token": {"content": "<end>", "lstrip": False},
        },
        special_tokens_map={"pad_token": "<pad>", "bos_token": None, "eos_token": "a"},
    )
    found = read_token_ids(tmp_path)
    assert dict(found.ids) == {"a": 0, "b": 1, "<pad>": 2, "<end>": 7}
    assert dict(found.special) == {"pad_token_id": 2, "eos_token_id": 7}
    assert found.without_row(2) == ["<pad>", "<end>"]
    assert found.without_row(8) == []


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 1}, [["a", -1.0], ["b", -2.0]]])
def test_a_fast_tokenizer_has_all_in_one_file(vocabulary: Any, tmp_path: Path) -> None:
    added = [{"id": 1, "content": "b"}, {"id": 2, "content": "<pad>"}]
    _write(tmp_path, tokenizer={"model": {"vocab": vocabulary}, "added_tokens": added})
    assert dict(read_token_ids(tmp_path).ids) == {"a": 0, "b": 1, "<pad>": 2}
    assert tokens_without_row(tmp_path, 3) is None
    said = tokens_without_row(tmp_path, 1)
    assert said is not None
    assert "no row of its 1: 'b', '<pad>'; as in transformers" in said


def test_a_folder_without_a_tokenizer_has_no_tokens(tmp_path: Path) -> None:
    assert not read_token_ids(tmp_path).ids
