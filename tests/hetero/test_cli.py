"""The command `hetero`: which program a name starts, with which words, and what it waits for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from hetero import cli
from hetero.errors import LinkError
from hetero.tools.perf import main as perf
from tests.commands import ROOT, ended


def test_every_command_has_a_module_whose_main_takes_words() -> None:
    for name, command in cli.COMMANDS.items():
        module = importlib.import_module(command.module)
        assert callable(module.main), name
        assert command.help[0].islower(), name


def test_help_lists_every_command_and_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from hetero.cli import main; code = main(['--help']); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    done = ended("-c", code)
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert listed == set(cli.COMMANDS)


def test_without_a_command_the_list_is_shown_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert "usage: hetero COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("pretain", "pretrain"),
        ("preprocess_data", "preprocess-data"),
        ("merge-data", "merge-datasets"),
        ("compare_loss", "compare-loss"),
    ],
)
def test_an_unknown_command_names_the_nearest(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert cli.main([typed]) == 2
    assert f"did you mean `hetero {meant}`?" in capsys.readouterr().err


def test_a_name_that_is_near_to_nothing_is_refused_with_the_way_to_the_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["xyzzy"]) == 2
    error = capsys.readouterr().err
    assert error == "error: 'xyzzy' is not a command; `hetero --help` lists the commands\n"


def test_a_command_and_its_file_are_the_same_program() -> None:
    """Their usage, their errors and their exit codes."""
    for words in (["--help"], ["--no-such-flag"]):
        command, file = (ended(*start, *words) for start in (["-m", "hetero", "plan"], PLAN))
        assert command.stdout == file.stdout
        assert command.stderr == file.stderr
        assert command.returncode == file.returncode == (0 if words == ["--help"] else 2)
    assert "usage: hetero plan" in ended(*PLAN, "--help").stdout


PLAN = [ROOT / "tools" / "plan.py"]


def test_a_subcommands_usage_names_both(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hetero perf", "links", "--help"])
    with pytest.raises(SystemExit):
        perf()
    assert "usage: hetero perf links" in capsys.readouterr().out


def test_a_library_that_is_not_built_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise LinkError("the library is not built")

    monkeypatch.setattr(cli, "import_module", refuse)
    monkeypatch.setattr(cli, "_begin", lambda _: None)
    assert cli.main(["perf"]) == 1
    assert capsys.readouterr().err == "error: the library is not built\n"


def test_the_launchers_flags_are_torchruns() -> None:
    parser = get_args_parser()
    for action in parser._actions:
        for flag in action.option_strings:
            if not flag.startswith("--") or flag in NOT_TAKEN:
                continue
            known = cli.WITHOUT_VALUE if action.nargs == 0 else cli.WITH_VALUE
            assert flag.replace("_", "-") in known, flag


NOT_TAKEN = ("--help", "--module", "--no-python", "--no_python", "--run-path", "--run_path")
"""What to start is the command itself."""


def test_launcher_flags_end_at_the_first_word_that_is_none() -> None:
    words = "--standalone --nproc_per_node 2 --rdzv-conf=timeout=9 --yaml-cfg tiny --nnodes 3"
    launcher, own = cli.launcher_flags(words.split())
    assert launcher == "--standalone --nproc_per_node 2 --rdzv-conf=timeout=9".split()
    assert own == "--yaml-cfg tiny --nnodes 3".split()
    assert cli.launcher_flags(["--num-layers", "2"]) == ([], ["--num-layers", "2"])
    assert cli.launcher_flags(["--nnodes"]) == (["--nnodes"], [])


def started(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], dict[str, str]]:
    """The launcher's command line and environment that a command becomes."""
    became: list[tuple[list[str], dict[str, str]]] = []

    def exec_(program: str, argv: list[str], environ: dict[str, str]) -> None:
        became.append((argv, environ))
        raise SystemExit

    monkeypatch.setattr(os, "execve", exec_)
    with pytest.raises(SystemExit):
        cli.main(words)
    return became[0]


def test_launcher_flags_in_front_start_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "pretrain --standalone --nproc-per-node 2 --yaml-cfg tiny".split()
    argv, environ = started(monkeypatch, *words)
    launcher = "-m hetero.run --standalone --nproc-per-node 2 -m hetero pretrain --yaml-cfg tiny"
    assert argv == [sys.executable, *launcher.split()]
    # A checkout need not be installed, and the current folder may hold another `megatron`.
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert environ["PYTHONSAFEPATH"] == "1"


def test_a_folder_with_another_megatron_does_not_reach_the_ranks(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "hetero", "pretrain", "--nproc-per-node", "1", "--no-such-flag"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "--no-such-flag" in done.stderr
    assert "megatron.core is" not in done.stderr
