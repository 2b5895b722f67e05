"""An interrupted preprocessing goes on where it was, and never shows half an index."""

import errno
import gzip
import itertools
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from hetero.tools.preprocess_data import main
from hetero.tools.preprocessing import batches, work_folder
from hetero.tools.preprocessing.work_folder import WorkFolder
from megatron.hetero.dataset_description import read_description
from tests import preloaded
from tests.commands import ROOT

TOOL = ROOT / "tools" / "preprocess_data.py"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
OUTPUT = ["out_text_document.bin", "out_text_document.idx"]


def write_inputs(folder: Path, documents: int = 40) -> list[str]:
    """The same kind of text four times: plain, gzipped, zstd and JSON Lines."""
    numbers = itertools.count()
    texts = [
        "".join(f"{next(numbers)} 7 \n{number}\n\n" for number in range(documents)).encode()
        for _ in range(3)
    ]
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + texts[0])
    (folder / "b.txt.gz").write_bytes(gzip.compress(texts[1]))
    (folder / "c.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(texts[2]))
    lines = (json.dumps({"text": f"{number} 8"}) for number in range(documents))
    (folder / "d.jsonl").write_text("\n".join(lines))
    return [str(folder / name) for name in ("a.txt", "b.txt.gz", "c.txt.zst", "d.jsonl")]


def flags_for(folder: Path, inputs: list[str], workers: int = 1) -> list[str]:
    return [
        *("--input", *inputs, "--output-prefix", f"{folder}/out", *NULL),
        *("--workers", str(workers), "--save-seconds", "0", "--append-eod"),
    ]


def output_in(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in OUTPUT]


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@contextmanager
def interrupted_after(
    count: int, error: BaseException | type[BaseException] = KeyboardInterrupt
) -> Iterator[None]:
    """End a run once it has saved `count` batches, as ctrl-C or a full disk would."""
    calls = itertools.count()
    add = WorkFolder.add

    def add_or_stop(self: WorkFolder, *args, **kwargs) -> None:
        if next(calls) == count:
            raise error
        add(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkFolder, "add", add_or_stop)
        yield


@pytest.fixture
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 3)


@pytest.fixture
def inputs(tmp_path, small_batches) -> list[str]:
    return write_inputs(tmp_path)


@pytest.fixture
def left(tmp_path, inputs, capsys) -> list[str]:
    """The flags of a run that was interrupted half-way."""
    flags = flags_for(tmp_path, inputs)
    with interrupted_after(20):
        assert main(flags) == 130
    capsys.readouterr()
    return flags


@settings(max_examples=8, deadline=None)
@given(
    stops=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    workers=st.sampled_from([1, 1, 1, 2]),
    batch=st.integers(2, 7),
)
def test_an_interrupted_run_gives_the_same_files_as_one_that_was_not(stops, workers, batch):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_DOCUMENTS", batch)
        folder = Path(name)
        inputs = write_inputs(folder)
        whole = folder / "whole"
        assert main(flags_for(whole, inputs)) == 0
        flags = flags_for(folder, inputs, workers)
        for stop in stops:
            with interrupted_after(stop):
                code = main(flags)
            if code == 0:
                break
            assert code == 130
            assert not any((folder / name).exists() for name in OUTPUT)
            # What was written behind the last save does not count.
            with open(folder / ".out.partial" / "0.bin", "ab") as stream:
                stream.write(b"torn")
        else:
            assert main(flags) == 0
        assert output_in(folder) == output_in(whole)
        assert hidden_in(folder) == []


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt, 130, "error: interrupted; what was done up to the last save is kept"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: {folder}: No space left on"),
    ],
)
def test_a_run_that_ends_early_says_how_to_go_on_and_the_next_one_from_where(
    tmp_path, inputs, capsys, error, code, said
):
    flags, folder = flags_for(tmp_path, inputs), f"{tmp_path}/.out.partial"
    with interrupted_after(2, error):
        assert main(flags) == code
    heard = capsys.readouterr().err
    assert "is kept in" in heard
    assert said.format(folder=folder) in heard
    assert main(flags) == 0
    heard = capsys.readouterr()
    assert f"continuing the interrupted run in {folder} after 6 docum" in heard.err
    assert "wrote 160 documents" in heard.out


def test_before_the_first_save_nothing_is_left(tmp_path, inputs, capsys):
    flags = flags_for(tmp_path, inputs)
    with interrupted_after(2):
        assert main([*flags, "--save-seconds", "1000"]) == 130
    assert hidden_in(tmp_path) == []
    assert capsys.readouterr().err.endswith("error: interrupted; nothing was written\n")


@pytest.mark.parametrize("renamed", range(6))
def test_a_run_that_ends_while_it_renames_shows_each_index_whole_or_not_at_all(
    tmp_path, small_batches, monkeypatch, renamed
):
    records = tmp_path / "records.jsonl"
    rows = ({"a": str(number), "b": f"{number} 5"} for number in range(20))
    records.write_text("\n".join(map(json.dumps, rows)))
    flags = [*flags_for(tmp_path, [str(records)]), "--json-keys", "a", "b"]
    replace, calls = os.replace, itertools.count()

    def replace_or_stop(source, target) -> None:
        if "_document" in str(target) and next(calls) == renamed:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(work_folder.os, "replace", replace_or_stop)
        assert main(flags) == 130
    shown = [key for key in "ab" if (tmp_path / f"out_{key}_document.idx").exists()]
    assert shown == ["a"] * (renamed >= 3)
    for key in shown:
        dataset = IndexedDataset(f"{tmp_path}/out_{key}_document")
        assert len(dataset) == 20
    assert main(flags) == 0
    for key, length in (("a", 2), ("b", 3)):
        dataset = IndexedDataset(f"{tmp_path}/out_{key}_document")
        assert dataset.sequence_lengths.tolist() == [length] * 20
        assert read_description(f"{tmp_path}/out_{key}_document") is not None
    assert hidden_in(tmp_path) == []


def other_input(folder: Path, flags: list[str]) -> list[str]:
    (folder / "a.txt").write_text("1 2 3")
    return flags


def other_tokenizer(folder: Path, flags: list[str]) -> list[str]:
    (folder / "words.json").write_text("{}")
    return [*flags, "--tokenizer-metadata", f"{folder}/words.json"]


def other_flags(folder: Path, flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag != "--append-eod"]


@pytest.mark.parametrize(
    ("change", "what"),
    [(other_input, "inputs"), (other_tokenizer, "tokenizer files"), (other_flags, "flags")],
)
def test_only_the_same_run_goes_on(tmp_path, left, capsys, change, what):
    state = (tmp_path / ".out.partial" / "state.json").read_bytes()
    changed = change(tmp_path, left)
    assert main(changed) == 2
    error = capsys.readouterr().err
    assert f"holds an interrupted run with other {what};" in error
    assert "--restart" in error
    assert (tmp_path / ".out.partial" / "state.json").read_bytes() == state
    assert main([*changed, "--restart"]) == 0
    assert "continuing" not in capsys.readouterr().err
    assert hidden_in(tmp_path) == []


def test_bad_input_leaves_nothing_for_it_has_to_change(tmp_path, inputs, capsys):
    with open(tmp_path / "d.jsonl", "a") as stream:
        stream.write("\n{")
    assert main(flags_for(tmp_path, inputs)) == 2
    assert "d.jsonl:41: broken JSON" in capsys.readouterr().err
    assert hidden_in(tmp_path) == []


def test_a_leftover_that_lost_bytes_is_refused_and_other_workers_may_go_on(tmp_path, left, capsys):
    tokens = tmp_path / ".out.partial" / "0.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1])
    assert main(left) == 2
    assert f"{tokens} is cut short" in capsys.readouterr().err
    tokens.write_bytes(whole)
    assert main([*left, "--workers", "2", "--log-interval", "7", "--save-seconds", "9"]) == 0
    assert "continuing the interrupted run" in capsys.readouterr().err


def test_kill_9_and_two_runs_at_once(tmp_path, capsys):
    text = tmp_path / "long.txt"
    text.write_text("1 2 3 4\n\n" * 20_000)
    assert main(flags_for(tmp_path / "whole", [str(text)])) == 0
    flags = flags_for(tmp_path, [str(text)], workers=2)
    for _ in range(2):
        process = preloaded.start(TOOL, [*flags, "--log-interval", "1"], environ=os.environ)
        for line in process.stderr:
            if line.startswith("processed"):
                break
        capsys.readouterr()
        assert main(flags) == 2
        assert "another process writes to" in capsys.readouterr().err
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=120)
        process.stderr.close()
        assert not any((tmp_path / name).exists() for name in OUTPUT)
    assert main(flags) == 0
    assert "continuing the interrupted run" in capsys.readouterr().err
    assert output_in(tmp_path) == output_in(tmp_path / "whole")
    assert hidden_in(tmp_path) == []
