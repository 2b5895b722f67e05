"""The C under sanitizers: both ends of a link in one process, whose rails are cut on the way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hetero.native.binding import FOLDER
from tests.hip_on_cuda.library import COMPILER, LACKING
from tests.loopback_nic.library import SOURCES as NICS
from tests.loopback_nic.library import VARIABLE

PROGRAM = Path(__file__).with_name("carriers.c")
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
COMMON = ["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-I", str(FOLDER)]
ENTRIES = 1500


@pytest.fixture(scope="module", params=SANITIZERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program and, beside it, its emulated NICs."""
    if COMPILER is None:
        pytest.skip(LACKING)
    folder = tmp_path_factory.mktemp(request.param)
    sources = [str(PROGRAM), *map(str, sorted(FOLDER.glob("*.c")))]
    flags = [*COMMON, *SANITIZERS[request.param]]
    for command in (
        [*flags, "-o", str(folder / "carriers"), *sources, "-lpthread", "-ldl"],
        [*flags, "-shared", "-fPIC", "-o", str(folder / "nics.so"), *map(str, NICS)],
    ):
        done = subprocess.run(
            [COMPILER, *command], capture_output=True, text=True, timeout=120, check=False
        )
        if "cannot find" in done.stderr:
            pytest.skip(f"NOT CHECKED: this compiler lacks the sanitizer: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr
    return folder / "carriers"


def run(program: Path, *arguments: object) -> int:
    """How many entries the two ends compared; whatever a sanitizer says is a failure."""
    environment = {**os.environ, VARIABLE: str(program.with_name("nics.so"))}
    done = subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)


@pytest.mark.parametrize(("kind", "rails"), [("tcp", 4), ("verbs", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_arrives_over_rails_that_are_cut(
    built: Path, kind: str, rails: int, seed: int
) -> None:
    """Each way, while the entries' numbers count round."""
    assert run(built, kind, seed, ENTRIES, rails) == 2 * ENTRIES


@pytest.mark.parametrize(("kind", "rails"), [("tcp", 4), ("verbs", 2)])
@pytest.mark.parametrize("seed", range(2))
def test_a_link_can_be_given_up_in_the_middle_of_everything(
    built: Path, kind: str, rails: int, seed: int
) -> None:
    assert run(built, kind, seed, 100 * ENTRIES, rails, 300 + 100 * seed) >= 300
