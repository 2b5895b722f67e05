"""How a tool ends: which sentence, told to whom, and which exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from hetero.errors import UserError
from hetero.tools.tool_command_line import Parser, run
from tests.commands import ROOT

FULL = (errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(*FULL, "out.bin"), "out.bin: No space"),
        (OSError(*FULL, "in.json", None, "out.json"), "in.json to out.json: No space"),
        (OSError(*FULL), "No space"),
    ],
)
def test_a_failed_write_names_every_file_that_it_is_about(error, named, capsys) -> None:
    def work() -> str:
        raise error

    assert run(work) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}")


def test_its_sentence_reaches_the_launchers_of_other_nodes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def work() -> str:
        raise UserError("there is no folder x")

    assert run(work) == 2
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "there is no folder x"
    assert message["extraInfo"]["printed"]


@pytest.mark.parametrize("environ", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", ["a tool", "hetero.tools.check_plan"])
def test_a_reader_who_leaves_ends_it_without_a_word(tmp_path, command, environ) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("meshes: [{vendor: nvidia, layers: [2]}]")
    tool = (
        "import sys; from hetero.tools.tool_command_line import run; sys.exit(run(lambda: 'text'))"
    )
    words = ["-c", tool] if command == "a tool" else ["-m", command, str(plan)]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert ended.stderr == ""
    assert ended.returncode in (128 + signal.SIGPIPE, -signal.SIGPIPE)


def test_what_stands_behind_the_dashes_is_pretrain_gpts_and_the_help_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser("Does nothing.")
    parser.add_argument("--out")
    own, others = parser.parse_with_run_flags(["--out", "here", "--", "--bf16", "--", "x"])
    assert (own.out, others) == ("here", ["--bf16", "--", "x"])
    assert parser.parse_with_run_flags(["--out", "here"])[1] == []
    with pytest.raises(SystemExit):
        parser.parse_with_run_flags(["--help"])
    assert "behind -- are flags of pretrain_gpt.py" in capsys.readouterr().out
