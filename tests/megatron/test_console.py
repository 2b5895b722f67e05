"""A log holds every line, whatever stdout and stderr are; a terminal has a bar besides."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import terminals

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

PROGRAM = """
from megatron.hetero.console import Console
from tests.megatron import test_outputs

console = Console(is_logger=True, total_iterations=3)
console.line("mixed run")
for number in (1, 2, 3):
    record = test_outputs.record(iteration=number)
    console.advance(record)
    console.iteration([record])
console.line(" validation loss")
console.close()
"""


def _show(folder: Path, on_terminal: list[str], size: tuple[int, int]) -> terminals.Shown:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    root = str(Path(__file__).resolve().parents[2])
    return terminals.run(
        [sys.executable, str(script)],
        folder,
        on_terminal=on_terminal,
        size=size,
        environ={"PYTHONPATH": root},
    )


def _lines(text: str) -> list[str]:
    """The lines of a text as an eye sees them: what a bar writes over is gone."""
    shown = [line.rsplit("\r", 1)[-1].strip() for line in text.replace("\r\n", "\n").split("\n")]
    return [line.split(" | ")[0].split("] ")[-1].strip() for line in shown if line]


WANTED = [
    "mixed run",
    "iteration        1/       3",
    "iteration        2/       3",
    "iteration        3/       3",
    "validation loss",
]


@pytest.mark.parametrize(
    ("on_terminal", "size"),
    [
        ([], (0, 0)),
        (["stdout"], (24, 200)),
        (["stderr"], (0, 0)),
        (["stdout", "stderr"], (24, 200)),
    ],
    ids=str,
)
def test_every_line_is_there_and_a_bar_where_stderr_is_a_terminal(
    tmp_path: Path, on_terminal: list[str], size: tuple[int, int]
) -> None:
    shown = _show(tmp_path, on_terminal, size)
    assert shown.code == 0
    log = shown.screen if "stdout" in on_terminal else shown.stdout
    assert [line for line in _lines(log) if not line.startswith("training:")] == WANTED
    has_bar = "training:" in (shown.screen if "stderr" in on_terminal else shown.stderr)
    assert has_bar == ("stderr" in on_terminal)
    assert "training:" not in shown.stdout
