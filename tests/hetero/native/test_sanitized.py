"""The C under sanitizers: an engine, and both ends of a link whose rails are cut on the way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hetero.native.binding import FOLDER
from tests.hip_on_cuda.library import COMPILER, LACKING
from tests.loopback_nic.library import SOURCES as NICS
from tests.loopback_nic.library import VARIABLE

PROGRAMS = [Path(__file__).with_name(name) for name in ("carriers.c", "words.c")]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
SHARED = ["-shared", "-fPIC", "-o"]
COMMON = ["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-I", str(FOLDER)]
MESSAGES = 600
LIVES = 40


@pytest.fixture(scope="module", params=SANITIZERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs, of the library that they test, and of their emulated NICs."""
    if COMPILER is None:
        pytest.skip(LACKING)
    folder = tmp_path_factory.mktemp(request.param)
    flags = [*COMMON, *SANITIZERS[request.param]]
    tested = [f"-L{folder}", "-lhetero", f"-Wl,-rpath,{folder}", "-lpthread", "-ldl"]
    for command in (
        [*flags, *SHARED, str(folder / "libhetero.so"), *map(str, sorted(FOLDER.glob("*.c")))],
        [*flags, *SHARED, str(folder / "nics.so"), *map(str, NICS)],
        *(
            [*flags, "-o", str(folder / program.stem), str(program), *tested]
            for program in PROGRAMS
        ),
    ):
        done = subprocess.run(
            [COMPILER, *command], capture_output=True, text=True, timeout=120, check=False
        )
        if "cannot find" in done.stderr:
            pytest.skip(f"NOT CHECKED: this compiler lacks the sanitizer: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr
    return folder


def run(folder: Path, name: str, *arguments: object) -> str:
    """Run a program and return its output; whatever a sanitizer says is a failure."""
    done = subprocess.run(
        [folder / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, VARIABLE: str(folder / "nics.so")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def exchange(folder: Path, *arguments: object, abandon: int = 0, lives: int = 1) -> int:
    """Returns how many messages the two ends of a link compared."""
    return int(run(folder, "carriers", *arguments, abandon, lives))


def test_a_word_that_a_device_writes_during_a_pass_is_not_missed(built: Path) -> None:
    run(built, "words")


TRANSPORTS = pytest.mark.parametrize(("kind", "rails"), [("tcp", 4), ("verbs", 2)])


@TRANSPORTS
@pytest.mark.parametrize("device", ["host", "gpu"])
@pytest.mark.parametrize(
    "seeds", [range(1), range(1, 2), pytest.param(range(2, 4), marks=pytest.mark.slow)]
)
def test_every_byte_arrives_over_rails_that_are_cut(
    built: Path, kind: str, rails: int, device: str, seeds: range
) -> None:
    """Each way, while the entries' numbers count round."""
    for seed in seeds:
        assert exchange(built, kind, device, seed, MESSAGES, rails) == 2 * MESSAGES


@TRANSPORTS
@pytest.mark.parametrize("seed", range(2))
def test_a_link_can_be_given_up_in_the_middle_of_everything(
    built: Path, kind: str, rails: int, seed: int
) -> None:
    """On a host: a GPU's streams copy garbage then, which a sanitizer takes for a race."""
    abandoned = 150 + 100 * seed
    assert exchange(built, kind, "host", seed, 100 * MESSAGES, rails, abandon=abandoned) >= 150


@pytest.mark.parametrize("abandon", [0, 8], ids=["whole", "given up"])
def test_links_of_one_process_end_and_others_follow(built: Path, abandon: int) -> None:
    """Each right after its last message, or amid transfers. Their buffers are freed at once."""
    count = exchange(built, "tcp", "host", 0, 6, 2, abandon=abandon, lives=LIVES)
    assert count == 12 * LIVES if abandon == 0 else count >= abandon * LIVES
