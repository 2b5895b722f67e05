"""What `tools/merge_datasets.py` promises: the token files of a and b are those of a and b."""

import json
import tempfile
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from hetero.tools import preprocess_data
from hetero.tools.merge_datasets import main
from hetero.tools.preprocessing import index_file
from megatron.hetero.dataset_checks import inspect_index
from megatron.hetero.dataset_description import (
    Description,
    TokenizerInfo,
    read_description,
)
from tests.megatron.token_files import build

sequence = st.lists(st.integers(0, 60_000), max_size=5)
document = st.lists(sequence, min_size=1, max_size=3)
corpus = st.lists(document, min_size=1, max_size=8).filter(
    lambda documents: any(any(parts) for parts in documents)
)


def contents(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(corpus, min_size=1, max_size=4), block=st.integers(1, 7))
def test_merging_indexes_is_indexing_all_documents(parts, block):
    """Byte for byte what megatron-core's builder writes, wherever a block of numbers ends."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_file, "BLOCK", block)
        folder = Path(name)
        prefixes = [build(folder / str(n), documents) for n, documents in enumerate(parts)]
        assert main(["--input", *prefixes, "--output-prefix", f"{folder}/merged"]) == 0
        whole = build(folder / "whole", [part for documents in parts for part in documents])
        assert contents(f"{folder}/merged") == contents(whole)


@settings(max_examples=10, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1, max_size=9),
        min_size=2,
        max_size=2,
    )
)
def test_preprocessing_two_inputs_apart_and_merging_is_preprocessing_both(texts):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--workers", "1"]
        inputs = []
        for number, documents in enumerate(texts):
            inputs.append(f"{folder}/{number}.jsonl")
            lines = (json.dumps({"text": " ".join(map(str, ids))}) for ids in documents)
            Path(inputs[-1]).write_text("\n".join(lines))

        def index(output: str, *paths: str) -> str:
            flags = ["--input", *paths, "--output-prefix", f"{folder}/{output}", *null]
            assert preprocess_data.main([*flags, "--append-eod"]) == 0
            return f"{folder}/{output}_text_document"

        apart = [index(str(number), path) for number, path in enumerate(inputs)]
        assert main(["--input", *apart, "--output-prefix", f"{folder}/merged"]) == 0
        assert contents(f"{folder}/merged") == contents(index("both", *inputs))


def test_a_folder_gives_its_token_files_by_name(tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    for name, token in (("b", 2), ("a", 1), ("c", 3)):
        build(tmp_path / "parts" / name, [[[token]]])
    assert main(["--input", f"{tmp_path}/parts", "--output-prefix", f"{tmp_path}/out"]) == 0
    dataset = IndexedDataset(f"{tmp_path}/out")
    assert [dataset[number].tolist() for number in range(3)] == [[1], [2], [3]]
    written = capsys.readouterr().out
    assert written.startswith("wrote 3 documents, 3 tokens from 3 datasets: ")


def merge(folder: Path, *inputs: str) -> list[str]:
    return ["--input", *inputs, "--output-prefix", f"{folder}/out"]


def test_bytes_behind_the_tokens_do_not_displace_what_follows(tmp_path):
    first = build(tmp_path / "first", [[[1, 2]]])
    with open(first + ".bin", "ab") as stream:
        stream.write(b"left over")
    second = build(tmp_path / "second", [[[3]]])
    assert main(merge(tmp_path, first, second)) == 0
    assert inspect_index(f"{tmp_path}/out").tokens == 3
    # Named, because megatron-core unmaps the file when the dataset goes, views or not.
    dataset = IndexedDataset(f"{tmp_path}/out")
    assert dataset[1].tolist() == [3]


def test_token_files_of_different_types_are_refused(tmp_path, refused):
    narrow = build(tmp_path / "narrow", [[[1]]])
    wide = build(tmp_path / "wide", [[[1]]], dtype=numpy.int32)
    assert "different tokenizers" in refused(main, merge(tmp_path, narrow, wide))


def described(prefix: str, size: int, digest: str | None, *, eod: bool = True) -> str:
    """What preprocess_data leaves beside its files."""
    tokenizer = TokenizerInfo("SentencePieceTokenizer", size, digest, f"{digest}.model")
    Path(prefix + ".json").write_text(Description(tokenizer, eod, {}).to_json())
    return prefix


def test_files_of_other_tokenizers_are_refused_all_at_once(tmp_path, refused):
    """Their ids fit one another's vocabulary, so nothing else would tell."""
    first, same, other, larger = (
        described(build(tmp_path / name, [[[1]]]), size, digest)
        for name, size, digest in (
            ("first", 500, "abc"),
            ("same", 500, "abc"),
            ("other", 500, "def"),
            ("larger", 600, "abc"),
        )
    )
    error = refused(main, merge(tmp_path, first, same, other, larger))
    assert f"{first} was made with SentencePieceTokenizer abc.model of 500 tokens" in error
    assert f"{other} was made with SentencePieceTokenizer def.model of 500 tokens" in error
    assert "(other tokens for the same text)" in error
    assert f"{larger} was made with" in error
    assert "(600 tokens and not 500)" in error
    assert f"{same} was" not in error
    assert not list(tmp_path.glob("*out*"))


def test_files_of_one_tokenizer_give_a_file_that_says_so(tmp_path, capsys):
    parts = [described(build(tmp_path / name, [[[1]]]), 500, "abc") for name in "ab"]
    assert main(merge(tmp_path, *parts)) == 0
    assert capsys.readouterr().err == ""
    found = read_description(f"{tmp_path}/out")
    assert found.tokenizer == TokenizerInfo("SentencePieceTokenizer", 500, "abc")
    assert found.append_eod is True
    assert found.made == {"joined from": parts}


def test_datasets_without_metadata_are_merged_with_a_warning(tmp_path, capsys):
    known, unknown = (build(tmp_path / name, [[[1]]]) for name in ("known", "unknown"))
    described(known, 500, "abc")
    out = described(build(tmp_path / "out", [[[1]]]), 500, "old")
    assert main(["--input", known, unknown, "--output-prefix", out, "--overwrite"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: nothing beside {unknown} says which tokenizer made it")
    assert not Path(out + ".json").exists()


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_damaged_part_is_named_and_nothing_is_written(tmp_path, refused, suffix):
    whole = build(tmp_path / "whole", [[[1, 2, 3]]])
    cut = build(tmp_path / "cut", [[[1, 2, 3]]])
    path = Path(cut + suffix)
    path.write_bytes(path.read_bytes()[:-1])
    error = refused(main, merge(tmp_path, whole, cut))
    assert str(path) in error
    assert "cut short" in error
    assert not list(tmp_path.glob("*out*"))


def test_an_existing_output_is_kept_unless_told_otherwise(tmp_path, refused):
    part = build(tmp_path / "part", [[[1], [2]]])
    (tmp_path / "part" / "cache").mkdir(parents=True)  # as one that was trained on
    out = build(tmp_path / "out", [[[9]]])
    assert f"{out}.bin exists" in refused(main, merge(tmp_path, part))
    assert main([*merge(tmp_path, part), "--overwrite"]) == 0
    assert contents(out) == contents(part)
    assert main([*merge(tmp_path, out, out), "--overwrite"]) == 0  # onto itself
    assert contents(out) == contents(build(tmp_path / "twice", [[[1], [2]], [[1], [2]]]))
