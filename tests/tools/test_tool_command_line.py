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
from hetero.text import integer
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


ALL_WRONG = (
    "error: 5 errors:",
    "  argument --tensor: must be a whole number of at least 1, not 'x'",
    "  argument --batch: expected one argument",
    "  argument --kind: invalid choice: 'c' (choose from ",
    "  the following arguments are required: --out",
    "  unrecognized arguments: --tensr; --help lists the flags",
)


@pytest.mark.parametrize("of_a_command", [False, True])
def test_all_that_is_wrong_with_a_command_line_is_told_at_once(
    of_a_command: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = whole = Parser("Does nothing.")
    if of_a_command:
        parser = whole.add_subparsers(dest="command", required=True).add_parser(
            "do", description="Does it."
        )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tensor", nargs="+", type=integer(1))
    parser.add_argument("--batch", type=integer(1))
    parser.add_argument("--kind", choices=("a", "b"))
    words = ["do"] * of_a_command
    for given, said in (
        ("f --tensor 1 x y --batch --kind c --tensr", ALL_WRONG),
        ("f --out o --batch", ["error: argument --batch: expected one argument; --help lists"]),
        ("f --out o --tensr 4", ["error: unrecognized arguments: --tensr 4"]),
    ):
        with pytest.raises(SystemExit) as ended:
            whole.parse_args([*words, *given.split()])
        assert ended.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith(told) for line, told in zip(lines, said, strict=True)), lines
    assert whole.parse_args([*words, *"f --out o --batch 3".split()]).batch == 3


def test_flags_of_a_run_are_unknown_to_a_tool_that_takes_them_and_no_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser("Does nothing.", takes_run_flags=True)
    parser.add_argument("--batch", type=integer(1))
    assert parser.parse_known_args(["--batch", "3", "--bf16"])[1] == ["--bf16"]
    with pytest.raises(SystemExit):
        parser.parse_known_args(["--batch", "x", "--bf16"])
    assert "--bf16" not in capsys.readouterr().err


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
