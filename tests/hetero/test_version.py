"""Checkouts of one version whose code differs are told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hetero import version as installed
from hetero.errors import UserError
from hetero.version import MEGATRON_CORES, exit_unless_installed, newest_core, sources


def sources_below(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "hetero" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_same_code_has_one_name_wherever_it_lies(tmp_path: Path) -> None:
    one, other = (sources_below(tmp_path / place, ring="x = 1\n") for place in ("a", "b"))
    assert sources(one) == sources(other)
    (other / "hetero" / "notes.txt").write_text("not code")
    sources.cache_clear()
    assert sources(one) == sources(other)


def test_another_line_or_another_file_name_is_other_code(tmp_path: Path) -> None:
    names = {
        sources(sources_below(tmp_path / "a", ring="x = 1\n")),
        sources(sources_below(tmp_path / "b", ring="x = 2\n")),
        sources(sources_below(tmp_path / "c", link="x = 1\n")),
    }
    assert len(names) == 3


def test_the_running_code_has_a_name() -> None:
    assert sources().startswith("sources ")


ROOT = Path(__file__).resolve().parents[2]
INSPECT = ROOT / "tools" / "inspect_data.py"
GUARD = (
    "import sys; {}; from hetero.version import exit_if_other_megatron; exit_if_other_megatron()"
)


def checkout(folder: Path, *, core: str | None = None, one_package: bool = False) -> Path:
    """What Megatron-LM has in the places of ours: packages that need what is not installed."""
    packages = ["megatron/training", "megatron/training/arguments", "tools", "examples", "tests"]
    for package in packages + ["megatron"] * one_package:
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").write_text("import six_of_another_megatron\n")
    if core is not None:
        (folder / "megatron/core").mkdir(parents=True)
        (folder / "megatron/core/__init__.py").write_text("import six_of_another_megatron\n")
        (folder / "megatron/core/package_info.py").write_text(f"__version__ = {core!r}\n")
    return folder


def run(
    *words: str | Path, beside: Path, cwd: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(beside), **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        (INSPECT, "--help"),
        ("-m", "hetero.tools.inspect_data", "--help"),
        (ROOT / "tools/preflight.py", "--help"),
        (ROOT / "pretrain_gpt.py", "--help"),
        (ROOT / "examples/quickstart/demo.py", "--help"),
    ],
    ids=["a tool", "a tool as a module", "preflight", "training", "the demo"],
)
def test_what_is_ours_wins(tmp_path: Path, words: tuple[str | Path, ...]) -> None:
    cwd = ROOT if words[0] == "-m" else tmp_path
    outcome = run(*words, beside=checkout(tmp_path / "Megatron-LM"), cwd=cwd)
    assert outcome.returncode == 0, outcome.stderr


def test_it_wins_in_processes_that_ours_start(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "def show(queue):\n"
        "    import megatron.hetero\n"
        "    queue.put(megatron.hetero.__file__)\n"
        "if __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    queue = spawn.Queue()\n"
        "    spawn.Process(target=show, args=(queue,)).start()\n"
        "    print(queue.get(timeout=60))\n"
    )
    outcome = run(script, beside=checkout(tmp_path / "Megatron-LM"), cwd=tmp_path)
    assert outcome.stdout.strip() == str(ROOT / "megatron/hetero/__init__.py"), outcome.stderr


@pytest.mark.parametrize("script", [INSPECT, ROOT / "pretrain_gpt.py"], ids=["a tool", "training"])
@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"core": "0.16.0"}, ("core/__init__.py, version 0.16.0", "supports 0.16.1, 0.17.0, ")),
        ({"core": "0.19.1"}, ("core/__init__.py, version 0.19.1", "0.18.2 and 0.19.0; ")),
        ({"one_package": True}, ("megatron/__init__.py, which hides", "")),
    ],
    ids=["an older core", "a withdrawn core", "Megatron-LM before 2024"],
)
def test_another_megatron_that_wins_is_named_once_with_exit_code_2(
    tmp_path: Path, script: Path, contents: dict, words: tuple[str, ...]
) -> None:
    beside = checkout(tmp_path / "Megatron-LM", **contents)
    outcome = run(script, "--help", beside=beside, cwd=tmp_path)
    assert outcome.returncode == 2, outcome.stderr
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: megatron")
    for word in (*words, f"take {beside} out of PYTHONPATH"):
        assert word in line
    second = run(script, "--help", beside=beside, cwd=tmp_path, LOCAL_RANK="1")
    assert (second.returncode, second.stderr) == (2, "")


def test_megatron_lm_in_front_of_an_installation_hides_none_of_it(tmp_path: Path) -> None:
    """Python puts PYTHONPATH before what pip installed; `megatron.training` stays NVIDIA's."""
    site = tmp_path / "site"
    site.mkdir()
    for package in ("hetero", "megatron"):
        (site / package).symlink_to(ROOT / package)
    beside = checkout(tmp_path / "Megatron-LM")
    (beside / "megatron/training/__init__.py").write_text("")
    names = "import megatron.training; print(megatron.training.__file__)"
    outcome = run(
        *("-P", "-c", f"{GUARD.format(f'sys.path.append({str(site)!r})')}; {names}"),
        beside=beside,
        cwd=tmp_path,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == str(beside / "megatron/training/__init__.py")


def test_a_python_without_the_project_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    exit_unless_installed("sys")
    with pytest.raises(SystemExit) as left:
        exit_unless_installed("sys", "no_such_module_at_all")
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: no_such_module_at_all is not installed for {sys.executable}; ")


def test_no_megatron_core_at_all_is_said(tmp_path: Path) -> None:
    # -S leaves out what pip installed.
    outcome = run(
        "-S",
        "-c",
        GUARD.format(f"sys.path.insert(0, {str(ROOT)!r})"),
        beside=tmp_path,
        cwd=tmp_path,
    )
    assert outcome.returncode == 2, outcome.stderr
    assert "megatron-core is not installed" in outcome.stderr
    assert f"pip install megatron-core=={newest_core()}" in outcome.stderr


@pytest.mark.parametrize("version", MEGATRON_CORES)
def test_a_supported_core_is_accepted_and_is_in_the_requirements(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(installed, "core_version", lambda: version)
    installed.require_supported_core()
    assert requirement("megatron-core").specifier.contains(version)


def test_an_environment_below_a_folder_on_the_path_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = checkout(tmp_path / ".venv/site-packages", core="0.15.0") / "megatron/core/__init__.py"
    monkeypatch.setattr(
        installed, "find_spec", lambda _: ModuleSpec("core", None, origin=str(core))
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match=r"0\.15\.0, and .*; pip install megatron-core=="):
        installed.require_supported_core()


def test_the_commit_that_a_release_appends_to_its_version_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = checkout(tmp_path, core="0.18.2+689b8256") / "megatron/core/__init__.py"
    monkeypatch.setattr(
        installed, "find_spec", lambda _: ModuleSpec("core", None, origin=str(core))
    )
    assert installed.core_version() == "0.18.2"


@pytest.mark.parametrize("version", ["0.16.0", "0.17.0rc1", "0.18.1", "0.19.1", "0.20.0"])
def test_a_withdrawn_or_unknown_core_is_refused_and_out_of_the_requirements(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(installed, "core_version", lambda: version)
    remedy = f"pip install megatron-core=={newest_core()}, in a virtual environment of its own"
    with pytest.raises(UserError, match=rf", version {version}, .* 0\.19\.0; {remedy}$"):
        installed.require_supported_core()
    assert not requirement("megatron-core").specifier.contains(version, prereleases=False)


@pytest.mark.parametrize(
    ("python", "release"), [((3, 11), "0.16.1"), ((3, 12), "0.19.0"), ((3, 13), "0.19.0")]
)
def test_the_core_to_install_is_one_that_this_python_can_have(
    python: tuple[int, int], release: str
) -> None:
    assert newest_core(python) == release


# PyTorch as the vendors' images bring it.

VENDORS_OWN = ["2.11.0a0+git1a2b3c4.nv25.8", "2.12.0a0+0123abcd", "2.11.0+rocm6.4.gitabc", "2.13.0"]


def requirement(name: str) -> Requirement:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return Requirement(next(line for line in lines if line.startswith(name)))


@pytest.mark.parametrize("version", VENDORS_OWN)
def test_a_vendors_pytorch_satisfies_the_requirement(version: str) -> None:
    assert requirement("torch").specifier.contains(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0a0+git1", "2.14.0"])
def test_a_release_out_of_range_does_not(version: str) -> None:
    assert not requirement("torch").specifier.contains(version, prereleases=True)
