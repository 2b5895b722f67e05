"""Checkouts of one version whose code differs are told apart."""

from __future__ import annotations

from pathlib import Path

from hetero.version import sources


def checkout(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "hetero" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_same_code_has_one_name_wherever_it_lies(tmp_path: Path) -> None:
    one, other = (checkout(tmp_path / place, ring="x = 1\n") for place in ("a", "b"))
    assert sources(one) == sources(other)
    (other / "hetero" / "notes.txt").write_text("not code")
    sources.cache_clear()
    assert sources(one) == sources(other)


def test_another_line_or_another_file_name_is_other_code(tmp_path: Path) -> None:
    names = {
        sources(checkout(tmp_path / "a", ring="x = 1\n")),
        sources(checkout(tmp_path / "b", ring="x = 2\n")),
        sources(checkout(tmp_path / "c", link="x = 1\n")),
    }
    assert len(names) == 3


def test_the_running_code_has_a_name() -> None:
    assert sources().startswith("sources ")
