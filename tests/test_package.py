"""The wheel and the sdist: what is in them, and that they work where no checkout is."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero.native.binding import sources_version
from tests.commands import ROOT
from tests.hip_on_cuda.library import COMPILER, LACKING

LEFT_OUT = (".git", ".venv", "build", "dist", "runs", ".cache", "__pycache__", ".*_cache", "raw")
TRAINS = (
    "pretrain --standalone --nproc-per-node 2 --yaml-cfg tiny --train-iters 3 --log-interval 1 "
    "--hetero-pipeline --hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1"
).split()


def has_package(name: str) -> bool:
    """Whether it is installed: a folder of that name, such as `build` in a checkout, is not it."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason=LACKING),
    pytest.mark.skipif(
        not has_package("build"), reason="NOT CHECKED: `build` is not here (pip install build)"
    ),
]


def run(*words: object, folder: Path, **environ: str) -> str:
    """What a command that ends well prints, on both streams."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both, made from a copy of the checkout; the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    ignore = shutil.ignore_patterns(*LEFT_OUT, "*.so", "*.egg-info", ".hypothesis")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    out = folder / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "-o", out, source, folder=folder)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


def own_files() -> set[str]:
    """The files of both packages, without caches and what is compiled."""
    found = (path for name in ("hetero", "megatron/hetero") for path in (ROOT / name).rglob("*"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def test_the_wheel_holds_what_runs_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        (record,) = (name for name in names if name.endswith("/RECORD"))
        listed = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
    assert names == listed
    own = {name for name in names if ".dist-info/" not in name}
    runs = {name for name in own_files() if not name.endswith((".c", ".h", ".md"))}
    assert own == runs | {"hetero/native/_native.so"}
    assert {"hetero/py.typed", "megatron/hetero/py.typed", "hetero/presets/tiny.yaml"} <= own
    assert "hetero/observe/page/index.html" in own
    assert {name.rsplit("/", 1)[-1] for name in names - own} >= {"LICENSE", "NOTICE", "METADATA"}


def test_no_file_of_either_is_in_a_folder_that_nvidia_has(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel, tarfile.open(built.sdist) as sdist:
        files = [member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()]
        for names in (wheel.namelist(), files):
            shared = [name for name in names if name.startswith("megatron/")]
            assert all(name.startswith("megatron/hetero/") for name in shared)
            assert len(shared) > 50


def test_the_sdist_has_all_sources_and_neither_tests_nor_benchmarks(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        files = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    assert {name for name in own_files() - files if not name.endswith(".md")} == set()
    assert {"setup.py", "pyproject.toml", "requirements.txt", "LICENSE", "CHANGELOG.md"} <= files
    assert not {name.split("/")[0] for name in files} & {"tests", "bench", "docs", "examples"}


def test_the_wheel_is_for_every_python_3_of_this_platform(built: Built) -> None:
    assert "-py3-none-linux_" in built.wheel.name


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A clean environment with one of them, which sees the dependencies and no checkout."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, folder=venv.parent)
    (site,) = venv.glob("lib/python*/site-packages")
    dependencies = {
        Path(spec.origin).parents[depth].as_posix()
        for name, depth in (("torch", 1), ("megatron.core", 2), ("setuptools", 1))
        if (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None
    }
    (site / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "-q"]
    file = built.wheel if request.param == "wheel" else built.sdist
    own = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(*pip, *own, file, folder=venv.parent)
    return venv


def python(venv: Path, code: str, **environ: str) -> str:
    return run(venv / "bin" / "python", "-c", code, folder=venv.parent, **environ).strip()


def test_the_command_lists_its_programs_without_torch(installed: Path) -> None:
    said = run(installed / "bin" / "hetero", "--help", folder=installed.parent)
    assert "\n  pretrain " in said
    code = "import hetero.cli, sys; hetero.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert "\n  pretrain " in python(installed, code)


def test_the_library_in_it_is_of_the_sources_that_it_was_built_from(installed: Path) -> None:
    code = "from hetero.native.binding import native; print(native().native_version())"
    assert int(python(installed, code)) == sources_version()


def test_its_own_requirements_are_known_without_a_checkout(installed: Path) -> None:
    code = (
        "from hetero.tools.preflight_checks.facts import own_requirements\n"
        "print(*own_requirements(), sep='\\n')"
    )
    assert "safetensors" in python(installed, code)


@pytest.fixture
def megatron_lm(tmp_path: Path) -> Path:
    """A checkout of Megatron-LM as NVIDIA has it: `megatron` without an __init__.py."""
    for name in ("training", "legacy"):
        package = tmp_path / "Megatron-LM" / "megatron" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    return tmp_path / "Megatron-LM"


def found(venv: Path, **environ: str) -> list[str]:
    """Where megatron.training and megatron.hetero are found."""
    code = (
        "from importlib.util import find_spec\n"
        "found = map(find_spec, ('megatron.training', 'megatron.hetero'))\n"
        "print(*(spec.origin for spec in found), sep='\\n')"
    )
    return python(venv, code, **environ).splitlines()


def trains(venv: Path, **environ: str) -> None:
    hetero, played = venv / "bin" / "hetero", {"HETERO_VENDOR": "plan"}
    said = run(hetero, *TRAINS, folder=venv.parent, **played, **environ)
    assert re.search(r"iteration +3/ +3 ", said)
    assert re.search(r"^ *0 +nvidia \(simulated\)", said, re.MULTILINE)
    assert re.search(r"^ *1 +amd \(simulated\)", said, re.MULTILINE)


@pytest.mark.slow
def test_it_trains_mixed_beside_a_checkout_of_megatron_lm(
    installed: Path, megatron_lm: Path
) -> None:
    training, ours = found(installed, PYTHONPATH=str(megatron_lm))
    assert Path(training) == megatron_lm / "megatron" / "training" / "__init__.py"
    assert Path(ours).is_relative_to(installed)
    trains(installed, PYTHONPATH=str(megatron_lm))


@pytest.mark.slow
def test_it_trains_mixed_beside_a_core_whose_wheel_has_nvidias_training(
    installed: Path, megatron_lm: Path
) -> None:
    """As from megatron-core 0.17 on, all in one site."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    (site,) = installed.glob("lib/python*/site-packages")
    theirs = {"training": megatron_lm / "megatron" / "training", "core": Path(spec.origin).parent}
    for name, source in theirs.items():
        (site / "megatron" / name).symlink_to(source)
    try:
        training, ours = found(installed)
        assert Path(training) == site / "megatron" / "training" / "__init__.py"
        assert Path(ours) == site / "megatron" / "hetero" / "__init__.py"
        trains(installed)
    finally:
        for name in theirs:
            (site / "megatron" / name).unlink()


@pytest.mark.slow
def test_a_tool_that_starts_runs_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "parity"
    words = ("--nproc", 2, "--transports", "shm", "--out", out, "--")
    flags = "--yaml-cfg tiny --train-iters 3 --log-interval 1 --deterministic-mode".split()
    run(installed / "bin" / "hetero", "prove-parity", *words, *flags, folder=installed.parent)
    assert (out / "parity.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(
    not has_package("ziglang"), reason="NOT CHECKED: `ziglang` is not here (pip install ziglang)"
)
@pytest.mark.parametrize(("machine", "number"), [("x86_64", 0x3E), ("aarch64", 0xB7)])
def test_the_sdist_compiles_for_either_machine_and_an_old_glibc(
    built: Built, tmp_path: Path, machine: str, number: int
) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    tag = f"manylinux_2_17_{machine}"
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.2.17"
    option = f"--config-setting=--build-option=--plat-name={tag}"
    words = ("-m", "build", "--no-isolation", "--wheel", option, "-o", tmp_path / "out", source)
    run(sys.executable, *words, folder=tmp_path, CC=compiler)
    (wheel,) = (tmp_path / "out").glob(f"*-py3-none-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("hetero/native/_native.so")
    assert library[:4] == b"\x7fELF"
    assert int.from_bytes(library[18:20], "little") == number
    versions = re.findall(rb"\0GLIBC_([0-9.]+)(?=\0)", library)
    assert versions
    assert max(tuple(map(int, version.split(b"."))) for version in versions) <= (2, 17)
