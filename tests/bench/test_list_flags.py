"""docs/flags.md is what the parser says."""

from __future__ import annotations

import pytest

from bench import list_flags
from megatron.hetero.arguments.parser import build_parser


def test_the_document_is_up_to_date(capsys) -> None:
    assert list_flags.main(["--check"]) == 0, capsys.readouterr().err


OLD_TABLE = f"before\n{list_flags.TABLE_BEGINS}old\n{list_flags.TABLE_ENDS}after\n"


@pytest.mark.parametrize(("name", "old"), [("DOCUMENT", "old"), ("CHECKPOINTS", OLD_TABLE)])
def test_a_document_that_is_old_is_reported_and_written_anew(
    monkeypatch, tmp_path, capsys, name, old
) -> None:
    document = tmp_path / "flags.md"
    document.write_text(old)
    monkeypatch.setattr(list_flags, name, document)
    assert list_flags.main(["--check"]) == 1
    assert "is out of date; run python -m bench.list_flags" in capsys.readouterr().err
    assert document.read_text() == old
    assert list_flags.main([]) == 0
    assert list_flags.main(["--check"]) == 0
    if name == "CHECKPOINTS":
        text = document.read_text()
        assert (text.splitlines()[0], text.splitlines()[-1]) == ("before", "after")
        row = next(line for line in text.splitlines() if "`--hidden-dropout`" in line)
        assert "| taken | equal, or typed | equal, or typed |" in row


def test_every_flag_is_listed_with_what_it_is_worth() -> None:
    text = list_flags.render()
    for flag in build_parser().flags - {"-h", "--help"}:
        assert f"`{flag}`" in text or not flag.startswith("--")
    assert "| `--hetero-pipeline` | ours |" in text
    assert "mixture-of-experts models" in text
