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
MESSAGES = 600
LIVES = 40


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


def run(program: Path, *arguments: object, abandon: int = 0, lives: int = 1) -> int:
    """How many messages the two ends compared; whatever a sanitizer says is a failure."""
    environment = {**os.environ, VARIABLE: str(program.with_name("nics.so"))}
    done = subprocess.run(
        [program, *map(str, (*arguments, abandon, lives))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)


TRANSPORTS = pytest.mark.parametrize(("kind", "rails"), [("tcp", 4), ("verbs", 2)])


@TRANSPORTS
@pytest.mark.parametrize("seed", range(4))
def test_every_byte_arrives_over_rails_that_are_cut(
    built: Path, kind: str, rails: int, seed: int
) -> None:
    """Each way, while the entries' numbers count round."""
    assert run(built, kind, seed, MESSAGES, rails) == 2 * MESSAGES


@TRANSPORTS
@pytest.mark.parametrize("seed", range(2))
def test_a_link_can_be_given_up_in_the_middle_of_everything(
    built: Path, kind: str, rails: int, seed: int
) -> None:
    assert run(built, kind, seed, 100 * MESSAGES, rails, abandon=150 + 100 * seed) >= 150


@pytest.mark.parametrize("abandon", [0, 8], ids=["whole", "given up"])
def test_links_of_one_process_end_and_others_follow(built: Path, abandon: int) -> None:
    """Each right after its last message, or amid transfers. Their buffers are freed at once."""
    count = run(built, "tcp", 0, 6, 2, abandon=abandon, lives=LIVES)
    assert count == 12 * LIVES if abandon == 0 else count >= abandon * LIVES
