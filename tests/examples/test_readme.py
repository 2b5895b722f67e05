"""README's commands do what they are said to when they are pasted into a shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.hetero.arguments import read_command_line

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONTAINERS = ROOT / "examples" / "containers" / "README.md"
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def block(words: str, text: str = README) -> str:
    """The one block of commands that holds these words."""
    (found,) = [commands for commands in BLOCK.findall(text) if words in commands]
    return found


def pasted(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run as in a checkout after `make setup`, with its environment active."""
    for name in ("pretrain_gpt.py", "tools", "hetero", "megatron", "examples"):
        (folder / name).symlink_to(ROOT / name)
    interpreters = f"{Path(sys.executable).parent}:{sys.prefix}/bin"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text(f"PATH={shlex.quote(interpreters)}:$PATH\n")
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{interpreters}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def test_the_mixed_command_for_one_machine_trains(tmp_path: Path) -> None:
    said = pasted(block("HETERO_VENDOR=plan"), tmp_path).stdout
    assert "simulated" in said
    assert "iteration       20/" in said
    assert re.search(r"0 +nvidia \(simulated\)", said)
    assert re.search(r"1 +amd \(simulated\)", said)


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    for name in ("requirements.txt", "constraints-cpu.txt", "pyproject.toml", "setup.py"):
        (tmp_path / name).touch()
    old = tmp_path / "python3.10"
    pretends = "import sys; sys.version_info = (3, 10, 13, 0, 0); exec(sys.argv[2])"
    old.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c '{pretends}' \"$@\"\n")
    old.chmod(0o755)
    ended = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "setup", f"PYTHON={old}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "is Python 3.10, and 3.11 or later is needed; name one with PYTHON=" in ended.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_commands_that_make_token_files_work_one_after_the_other(tmp_path: Path) -> None:
    said = pasted(block("preprocess_data.py"), tmp_path).stdout
    assert "wrote tok.model and tok.vocab: vocabulary of 1024 tokens" in said
    assert (tmp_path / "data_text_document.idx").is_file()
    assert said.splitlines()[-1]


def test_preflight_stands_before_the_command_for_two_nodes() -> None:
    assert README.index(block("preflight.py")) < README.index(block("<your Megatron flags>"))


def test_the_command_for_two_nodes_is_one_that_the_program_takes() -> None:
    command = block("<your Megatron flags>").replace("<your Megatron flags>", "")
    words = shlex.split(command.replace("\\\n", " "))
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    preset = ["--yaml-cfg", str(ROOT / "examples/presets/llama3.1_8b.yaml"), "--mock-data"]
    others = "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1".split()
    plan = read_command_line([*preset, *others, *flags], world_size=16).plan
    assert [mesh.vendor for mesh in plan.meshes] == ["nvidia", "amd"]
    assert plan.layers == ((17,), (15,))


def test_what_has_not_run_is_said_on_the_first_screen() -> None:
    first = " ".join(README.splitlines()[:8])
    assert "not yet run on an AMD GPU, over an RDMA NIC or between two real hosts" in first


@pytest.mark.parametrize("document", ["README.md", "examples/containers/README.md"])
def test_the_shell_can_read_every_block(document: str) -> None:
    for commands in BLOCK.findall((ROOT / document).read_text()):
        plain = re.sub(r"<[^>]*>", "X", commands)
        ended = subprocess.run(["bash", "-n", "-c", plain], capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("start", "devices"),
    [("docker run --rm -it --gpus", {"--gpus"}), ("docker run --rm -it --device", {"--device"})],
)
def test_a_container_gets_all_that_a_link_uses(start: str, devices: set[str]) -> None:
    words = set(shlex.split(block(start, CONTAINERS.read_text())))
    assert devices | {"--network", "--ipc", "--ulimit"} <= words
    assert {"host", "memlock=-1", "/dev/infiniband"} <= words
    if "--gpus" not in words:
        assert {"/dev/kfd", "/dev/dri", "video", "render"} <= words


def test_apptainer_is_told_whose_gpus_it_is_to_show() -> None:
    text = CONTAINERS.read_text()
    assert "IMAGE_NVIDIA" in block("apptainer exec --nv", text)
    assert "IMAGE_AMD" in block("apptainer exec --rocm", text)
