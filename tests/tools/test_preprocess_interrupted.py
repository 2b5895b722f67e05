"""A run of preprocessing that fails, is interrupted or killed leaves nothing, or all files."""

import errno
import gzip
import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset

from hetero.tools.preprocess_data import main
from hetero.tools.preprocessing import batches, output_files
from hetero.tools.preprocessing.output_files import OutputFiles
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
        *("--workers", str(workers), "--append-eod"),
    ]


def output_in(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in OUTPUT]


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@contextmanager
def interrupted_after(
    count: int, error: BaseException | type[BaseException] = KeyboardInterrupt
) -> Iterator[None]:
    """End a run once it has written `count` batches, as ctrl-C or a full disk would."""
    calls = itertools.count()
    add = OutputFiles.add

    def add_or_stop(self: OutputFiles, *args, **kwargs) -> None:
        if next(calls) == count:
            raise error
        add(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputFiles, "add", add_or_stop)
        yield


@pytest.fixture
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 3)


@pytest.fixture
def inputs(tmp_path, small_batches) -> list[str]:
    return write_inputs(tmp_path)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt, 130, "error: interrupted; nothing was written"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: {folder}: No space left on"),
    ],
)
def test_a_run_that_ends_early_leaves_nothing(tmp_path, inputs, capsys, error, code, said):
    flags = flags_for(tmp_path, inputs)
    with interrupted_after(2, error):
        assert main(flags) == code
    assert said.format(folder=f"{tmp_path}/.out.partial") in capsys.readouterr().err
    assert hidden_in(tmp_path) == []
    assert not any((tmp_path / name).exists() for name in OUTPUT)
    assert main(flags) == 0
    assert "wrote 160 documents" in capsys.readouterr().out


def test_ctrl_c_while_files_are_renamed_comes_too_late(tmp_path, small_batches, monkeypatch):
    records = tmp_path / "records.jsonl"
    rows = ({"a": str(number), "b": f"{number} 5"} for number in range(20))
    records.write_text("\n".join(map(json.dumps, rows)))
    flags = [*flags_for(tmp_path, [str(records)]), "--json-keys", "a", "b"]
    replace = os.replace

    def replace_and_interrupt(source, target) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(output_files.os, "replace", replace_and_interrupt)
        assert main(flags) == 0
    for key, length in (("a", 2), ("b", 3)):
        dataset = IndexedDataset(f"{tmp_path}/out_{key}_document")
        assert dataset.sequence_lengths.tolist() == [length] * 20
        assert read_description(f"{tmp_path}/out_{key}_document") is not None
    assert hidden_in(tmp_path) == []


def test_files_that_exist_are_kept_until_new_ones_are_whole(tmp_path, inputs):
    flags = flags_for(tmp_path, inputs)
    assert main(flags) == 0
    before = output_in(tmp_path)
    assert main(flags) == 2
    with interrupted_after(2):
        assert main([*flags, "--overwrite"]) == 130
    assert output_in(tmp_path) == before
    (tmp_path / "a.txt").write_text("1 2 3")
    assert main([*flags, "--overwrite"]) == 0
    assert output_in(tmp_path) != before


def test_bad_input_leaves_nothing(tmp_path, inputs, capsys):
    with open(tmp_path / "d.jsonl", "a") as stream:
        stream.write("\n{")
    assert main(flags_for(tmp_path, inputs)) == 2
    assert "d.jsonl:41: broken JSON" in capsys.readouterr().err
    assert hidden_in(tmp_path) == []


def test_a_killed_run_is_begun_again_and_two_at_once_are_refused(tmp_path, capsys):
    text = tmp_path / "long.txt"
    text.write_text("1 2 3 4\n\n" * 40_000)
    assert main(flags_for(tmp_path / "whole", [str(text)])) == 0
    flags = flags_for(tmp_path, [str(text)], workers=2)
    process = preloaded.start(TOOL, [*flags, "--log-interval", "1"], environ=os.environ)
    for line in process.stderr:
        if line.startswith("processed"):
            process.send_signal(signal.SIGSTOP)  # or it might be through by now
            break
    capsys.readouterr()
    assert main(flags) == 2
    assert "another process writes to" in capsys.readouterr().err
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=120)
    process.stderr.close()
    assert not any((tmp_path / name).exists() for name in OUTPUT)
    assert main(flags) == 0
    assert output_in(tmp_path) == output_in(tmp_path / "whole")
    assert hidden_in(tmp_path) == []
