"""What tools refuse in a sentence, exit code 2, before they write anything: refusals.txt has it."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import scripts
from tests.commands import ROOT
from tests.launch_table import Launch, read_table
from tests.tools.refusals import Refused


def main_of(script: str) -> Callable[[list[str]], int]:
    folder, _, name = script.rpartition("/")
    if package := {"tools": "hetero.tools", "bench": "bench"}.get(folder):
        return importlib.import_module(f"{package}.{name}").main
    module = scripts.load(ROOT / f"{script}.py")
    return lambda _: module.main()  # which reads sys.argv


@pytest.mark.parametrize(
    "launch",
    read_table(Path(__file__).with_name("refusals.txt")),
    ids=lambda launch: f"{Path(launch.section).name} {launch.flags}",
)
def test_what_a_tool_cannot_do_is_one_sentence_and_leaves_nothing(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    made, folder = tmp_path / "made", tmp_path / "folder"
    (made / "hf").mkdir(parents=True)
    (made / "file").write_text("some text\n")
    folder.mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    before = set(tmp_path.rglob("*"))
    places = {"folder": folder, "made": made, "file": made / "file"}
    words = shlex.split(f"{launch.base} {launch.flags}".format(**places))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [launch.section, *words])
    expected = launch.result.format(**places).split(" // ")
    said = refused(main_of(launch.section), words, several=len(expected) > 1)
    assert [one for one in expected if one not in said] == []
    assert set(tmp_path.rglob("*")) == before
