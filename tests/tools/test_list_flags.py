"""docs/flags.md is what the parser says."""

from __future__ import annotations

from megatron.training.arguments.parser import build_parser
from tools import list_flags


def test_the_document_is_up_to_date(capsys) -> None:
    assert list_flags.main(["--check"]) == 0, capsys.readouterr().err


def test_a_document_that_is_not_is_reported_and_written_anew(monkeypatch, tmp_path, capsys) -> None:
    document = tmp_path / "flags.md"
    document.write_text("old")
    monkeypatch.setattr(list_flags, "DOCUMENT", document)
    assert list_flags.main(["--check"]) == 1
    assert "is out of date; run python -m tools.list_flags" in capsys.readouterr().err
    assert document.read_text() == "old"
    assert list_flags.main([]) == 0
    assert list_flags.main(["--check"]) == 0


def test_a_table_of_the_model_s_flags_that_is_old_is_reported_and_written_anew(
    monkeypatch, tmp_path, capsys
) -> None:
    document = tmp_path / "checkpoints.md"
    document.write_text(f"before\n{list_flags.TABLE_BEGINS}old\n{list_flags.TABLE_ENDS}after\n")
    monkeypatch.setattr(list_flags, "CHECKPOINTS", document)
    assert list_flags.main(["--check"]) == 1
    assert "is out of date" in capsys.readouterr().err
    assert list_flags.main([]) == 0
    assert list_flags.main(["--check"]) == 0
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    row = next(line for line in text.splitlines() if "`--hidden-dropout`" in line)
    assert "| taken | equal, or typed | equal, or typed |" in row


def test_every_flag_is_listed_with_what_it_is_worth() -> None:
    text = list_flags.render()
    for flag in build_parser().flags - {"-h", "--help"}:
        assert f"`{flag}`" in text or not flag.startswith("--")
    assert "| `--hetero-pipeline` | ours |" in text
    assert "mixture-of-experts models" in text
