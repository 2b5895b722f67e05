"""Text that needs no download: there is enough of it, it is text, and any part is a fair sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.real_text import text_sources
from bench.real_text.text_sources import source_documents

SEVERAL_EPOCHS_OF_500_ITERATIONS = 3.6 * 500 * 32 * 1024 / 3


def test_there_is_enough_text_for_the_parity_benchmark() -> None:
    """500 iterations of 32 x 1024 tokens, each seen three times at most."""
    documents = source_documents(round(SEVERAL_EPOCHS_OF_500_ITERATIONS))
    assert sum(map(len, documents)) >= SEVERAL_EPOCHS_OF_500_ITERATIONS
    assert len(set(documents)) > 0.9 * len(documents)


def test_a_longer_text_begins_with_the_shorter_one() -> None:
    short, long = source_documents(700_000), source_documents(900_000)
    assert long[: len(short)] == short
    assert len(long) > len(short)
    # Not a document more than is asked for.
    assert sum(map(len, short[:-1])) < 700_000


def test_what_is_no_text_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("print('Grüße')\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("# Grüße\n".encode("latin-1"))
    (tmp_path / "zero.py").write_bytes(b"a = 1\n\0\n")
    (tmp_path / "blank.py").write_text("\n \n")
    (tmp_path / "table.py").write_text("x" * (text_sources.LARGEST_FILE_BYTES + 1))
    (tmp_path / "data.txt").write_text("no source")
    monkeypatch.setattr(text_sources, "_folders", lambda: [("package", tmp_path)])
    monkeypatch.setattr(text_sources, "_topics", lambda: ["a topic"])
    assert source_documents(10**6) == ["a topic", "print('Grüße')\n"]


def test_packages_beside_the_standard_library_are_not_counted_as_pythons_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("os.py", "site-packages/mine.py", "dist-packages/yours.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(text_sources, "_folders", lambda: [("python", tmp_path)])
    monkeypatch.setattr(text_sources, "_topics", list)
    assert source_documents(10**6) == ["os.py"]
