"""Where tokens come from, and the tokenizer that made them."""

import json
import tempfile
from pathlib import Path

import pytest

REAL = {"without": "--mock-data"}


def test_blend_can_be_read_from_a_file(parse, tmp_path: Path):
    listed = tmp_path / "blend.txt"
    listed.write_text("0.3 a\n0.7 b\n")
    args = parse(f"--data-args-path {listed}", **REAL)
    assert args.data_path == ["0.3", "a", "0.7", "b"]
    assert args.split == "969, 30, 1"


def test_blends_of_the_splits_can_be_read_from_a_file(parse, tmp_path: Path):
    listed = tmp_path / "splits.json"
    listed.write_text(json.dumps({"train": [0.3, "a", 0.7, "b"], "valid": "1 c\n2 d"}))
    args = parse(f"--per-split-data-args-path {listed}", **REAL)
    assert args.train_data_path == ["0.3", "a", "0.7", "b"]
    assert (args.valid_data_path, args.test_data_path) == (["1", "c", "2", "d"], None)


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--data-args-path", None, "cannot be read (No such file or directory)"),
        ("--data-args-path", "", "--data-path names no file"),
        ("--per-split-data-args-path", "[", "is not a JSON object"),
        ("--per-split-data-args-path", '{"training": ["a"]}', "is not a JSON object"),
        ("--per-split-data-args-path", '{"train": 1}', "is not a JSON object"),
        ("--per-split-data-args-path", '{"train": [["a"]]}', "is not a JSON object"),
        ("--per-split-data-args-path", '{"valid": ["a"]}', "nothing is named to train on"),
    ],
)
def test_file_of_a_blend_that_cannot_be_used_is_refused(refusal, tmp_path, flag, text, words):
    path = tmp_path / "list"
    if text is not None:
        path.write_text(text)
    assert words in refusal(f"{flag} {path}", **REAL)


def test_workers_need_a_short_path_of_temporary_files(parse, refusal, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/" + 70 * "x")
    assert "is too long for the sockets of --num-workers 2; set TMPDIR" in refusal(
        "--num-workers 2"
    )
    assert parse("--num-workers 0").num_workers == 0
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/" + 66 * "x")
    assert parse("--num-workers 2").num_workers == 2
