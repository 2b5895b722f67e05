"""One virtual environment for every release of megatron-core and every Python.

What all releases of a Python share (PyTorch above all) is installed once, in a base environment
that the others see through a path file. So megatron-core alone differs between them. They are
reused: pip changes only what the requirements ask for.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import HeteroError
from hetero.version import MEGATRON_CORES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache/versions"
PYTHONS = ("python3.11", "python3.12", "python3.13")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python with one release of megatron-core and this checkout."""

    release: str
    python: str
    """Its version, as in 3.12.1."""
    torch: str
    executable: Path

    @property
    def name(self) -> str:
        return f"megatron-core {self.release}, Python {self.python}, torch {self.torch}"


@dataclass(frozen=True, kw_only=True)
class NotMade:
    """An environment that could not be made, and why."""

    release: str
    python: str
    reason: str

    @property
    def name(self) -> str:
        return f"megatron-core {self.release}, {self.python}"


def add_environment_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--releases", nargs="+", default=MEGATRON_CORES, help="releases of megatron-core"
    )
    parser.add_argument(
        "--pythons", nargs="+", default=PYTHONS, help="commands or paths of interpreters"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where the environments and the logs are"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")


class PipError(HeteroError):
    """pip could not install something."""


def make_environments(
    releases: Sequence[str] = MEGATRON_CORES,
    pythons: Sequence[str] = PYTHONS,
    *,
    folder: Path = FOLDER,
) -> Iterator[Environment | NotMade]:
    """Make them one after the other. `pythons` are commands or paths of interpreters."""
    for python in pythons:
        try:
            base = _make_base(python, folder)
        except HeteroError as error:
            for release in releases:
                yield NotMade(release=release, python=python, reason=str(error))
            continue
        for release in releases:
            try:
                yield _make(release, base=base, folder=folder)
            except HeteroError as error:
                yield NotMade(release=release, python=python, reason=str(error))


@dataclass(frozen=True, kw_only=True)
class _Base:
    executable: Path
    python: str
    torch: str


def _make_base(python: str, folder: Path) -> _Base:
    """All requirements but megatron-core."""
    found = shutil.which(python)
    if found is None:
        raise HeteroError(f"there is no {python} on the path")
    version = _output([found, "-c", "import platform; print(platform.python_version())"])
    place = folder / f"python{version}"
    executable = place / "bin/python"
    if not executable.exists():
        _output([found, "-m", "venv", str(place)])
    constraints = ("-c", str(ROOT / "constraints-cpu.txt"))
    _pip(executable, executable, [*constraints, *shared_requirements()])
    torch = _output([str(executable), "-c", "import torch; print(torch.__version__)"])
    return _Base(executable=executable, python=version, torch=torch)


def shared_requirements() -> list[str]:
    """What every release has beside it: to run, and to run the tests."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*lines, *(n for e in ("dev", "hf") for n in extras["optional-dependencies"][e])]
    return [n for n in named if n and not n.startswith(("#", "megatron-core"))]


def _make(release: str, *, base: _Base, folder: Path) -> Environment:
    place = folder / f"core{release}-python{base.python}"
    executable = place / "bin/python"
    if not executable.exists():
        _output([str(base.executable), "-m", "venv", "--without-pip", str(place)])
    sites = [_output([str(p), "-c", _SITE]) for p in (executable, base.executable)]
    # Read after the environment's own packages, which thus hide the base's.
    Path(sites[0], "zz_base.pth").write_text(sites[1] + "\n")
    _pip(base.executable, executable, ["--no-deps", f"megatron-core=={release}"])
    # What it builds with is the base's.
    _pip(base.executable, executable, ["--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    return Environment(release=release, python=base.python, torch=base.torch, executable=executable)


_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def _pip(pip: Path, target: Path, words: Sequence[str]) -> None:
    """Install into the environment of `target` with the pip of `pip`. Raises PipError."""
    command = [str(pip), "-m", "pip", "--python", str(target), "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "install", "--quiet", "--no-compile", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        (target.parents[1] / "pip.log").write_text(done.stdout + done.stderr)
        raise PipError(reason_of([*errors, f"pip exited with code {done.returncode}"]))


def reason_of(errors: Sequence[str]) -> str:
    """Of pip's errors the first that is no list of versions, without such a list in it."""
    plain = [e for e in errors if "Ignored the following" not in e] or list(errors)
    return re.sub(r" \(from versions: .*?\)", "", plain[0].removeprefix("ERROR: "))[:300]


def _output(command: Sequence[str]) -> str:
    """What a command prints. Raises HeteroError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or f"it exited with code {done.returncode}").splitlines()
        # A traceback tells the reason last, a command such as pyenv's first.
        reason = said[-1] if said[0].startswith("Traceback") else said[0]
        raise HeteroError(f"{Path(command[0]).name}: {reason}")
    return done.stdout.strip()
