"""Runs the launch scripts and reads the commands that they print."""

from __future__ import annotations

import os
import shlex
import subprocess
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from hetero.plan import Plan
from megatron.hetero.arguments import read_command_line

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A script in an environment of its own, so that nothing of the caller's is taken for its."""
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def refusals(outcome: subprocess.CompletedProcess[str]) -> list[str]:
    """The sentences with which a script has refused its settings: one, or several at once."""
    assert outcome.returncode == 2, outcome
    first, *sentences = outcome.stderr.splitlines()
    if not sentences:
        return [first.removeprefix("error: ")]
    assert first == f"error: {len(sentences)} errors:"
    assert all(sentence.startswith("  ") for sentence in sentences)
    return [sentence.strip() for sentence in sentences]


def refusal(script: str, *arguments: str, **environ: str) -> str:
    """The one sentence with which a script refuses its settings."""
    (sentence,) = refusals(run(script, *arguments, **environ))
    return sentence


@dataclass(frozen=True)
class Command:
    """A printed command: its environment, the launcher's options and the program's parsed flags."""

    environ: dict[str, str]
    launcher: dict[str, str]
    args: Namespace
    plan: Plan


def parsed(line: str, world_size: int | None = None) -> Command:
    """`world_size` where not all nodes have as many processes as this one."""
    env, *words = shlex.split(line)
    assert env == "env"
    environ = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    assert words[1:3] == ["-m", "hetero.run"]
    assert environ["PYTHONPATH"].split(":")[0] == str(ROOT)
    entry = words.index(str(ROOT / "pretrain_gpt.py"))
    options = [word for word in words[3:entry] if word != "--standalone"]
    launcher = dict(zip(options[::2], options[1::2], strict=True))
    world_size = world_size or int(launcher.get("--nnodes", 1)) * int(launcher["--nproc-per-node"])
    read = read_command_line(words[entry + 1 :], world_size=world_size)
    return Command(environ, launcher, read.args, read.plan)


def printed(script: str, *arguments: str, world_size: int | None = None, **environ: str) -> Command:
    outcome = run(script, *arguments, "--dry-run", **{"DATA_PATH": "/data/tokens"} | environ)
    assert outcome.returncode == 0, outcome.stderr
    (line,) = outcome.stdout.splitlines()
    return parsed(line, world_size)
