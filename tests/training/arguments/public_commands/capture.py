"""What words a shell script passes to its training program: the script is run, the program is not.

The script runs by bash, as it is, in a throw-away machine: its own mount and network namespaces, a
file system whose changes are dropped, no network, a time limit. Launchers (torchrun, python, srun,
singularity, ...) are replaced by `stub.py`, which writes down the words that it was given. Needs
root on Linux, for the namespaces.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
STUB = HERE / "stub.py"
SHELL_FUNCTIONS = HERE / "tolerant.sh"

RECORDED_AS = "python python3 torchrun ft_launcher deepspeed accelerate".split()
PASSED_THROUGH = (
    "srun singularity apptainer uv numactl nsys mpirun mpiexec sudo nohup docker enroot sbatch "
    "numa_bind rocprof rocprofv3 salloc stdbuf"
).split()
SILENT = (
    "pip pip3 wget curl git ssh scp apt apt-get yum conda module nvidia-smi rocm-smi amd-smi "
    "hl-smi scontrol squeue sinfo kill pkill killall reboot shutdown sleep ifconfig ip "
    "ibdev2netdev modprobe yq aws gsutil azcopy huggingface-cli hf wandb rsync tensorboard"
).split()

APART = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")

# What a script leaves for its user to fill in, in place of a path.
BLANK = re.compile(r"(?<==)<[^<>\n]+>")

# Run by bash inside the new namespaces; the words after it are: checkout, script, its arguments.
INSIDE = r"""
set -e
room=$1 checkout=$2; shift 2
mount -t tmpfs tmpfs "$room"
mkdir "$room"/upper "$room"/work "$room"/root "$room"/tree_upper "$room"/tree_work
mount -t overlay overlay -o "lowerdir=/,upperdir=$room/upper,workdir=$room/work" "$room/root"
for kernel in dev proc; do mount --rbind /$kernel "$room/root/$kernel"; done
mkdir -p "$room/root/checkout" "$room/root/home/user" "$room/root/stubs" "$room/root/records"
mount -t overlay overlay \
  -o "lowerdir=$checkout,upperdir=$room/tree_upper,workdir=$room/tree_work" "$room/root/checkout"
cp -r "$STUBS"/. "$room/root/stubs/"
if [ -e "$STUBS/filled_in" ]; then cp "$STUBS/filled_in" "$room/root/checkout/$SCRIPT"; fi
mount --bind "$RECORDS" "$room/root/records"
mkdir -p "$room/root/usr/local/bin"
cp "$STUBS/yq" "$room/root/usr/local/bin/yq"
cd "$room/root"
exec chroot . /bin/bash -c 'cd "$START"; exec /usr/bin/env -i "$@"' bash "$@"
"""


@dataclass(frozen=True)
class Captured:
    """One start of a training program."""

    program: str
    words: tuple[str, ...]
    world_size: int
    environment: Mapping[str, str] = field(default_factory=dict)


def capture(
    checkout: Path,
    script: str,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    start: str = "",
    files: Mapping[str, str] | None = None,
    time_limit: int = 15,
) -> tuple[list[Captured], str]:
    """The commands that `script` (a path in `checkout`) starts, and what it printed.

    It starts in the folder `start` of the checkout, the checkout itself where left out.
    `files` are put into /stubs, by name.
    """
    with tempfile.TemporaryDirectory() as folder:
        room, stubs, records = (Path(folder, name) for name in ("room", "stubs", "records"))
        for path in (room, stubs, records):
            path.mkdir()
        _write_stubs(stubs)
        text = (checkout / script).read_text(errors="replace")
        if BLANK.search(text):
            (stubs / "filled_in").write_text(BLANK.sub("/path", text))
        for name, content in (files or {}).items():
            (stubs / name).write_text(content)
        words = _inner_command(text, script, arguments, environment or {})
        try:
            done = subprocess.run(
                [*APART, "bash", "-c", INSIDE, "bash", str(room), str(checkout), *words],
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "STUBS": str(stubs),
                    "RECORDS": str(records),
                    "SCRIPT": script,
                    "START": f"/checkout/{start}",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=time_limit,
                check=False,
            )
            printed = done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            printed = (error.stdout or b"").decode(errors="replace") + "\n(time limit)"
        # Several ranks of one script start at once and write the same words.
        found: dict[tuple[str, ...], Captured] = {}
        for record in sorted(records.iterdir()):
            content = json.loads(record.read_text())
            one = Captured(
                content["program"],
                tuple(content["words"]),
                content["world_size"],
                content["environment"],
            )
            found.setdefault(one.words, one)
        return list(found.values()), printed


def _write_stubs(folder: Path) -> None:
    stub = f"#!{Path(sys.executable).resolve()} -ISE\n" + STUB.read_text().split("\n", 1)[1]
    for name in ("stub", *RECORDED_AS, *PASSED_THROUGH, *SILENT):
        path = folder / name
        path.write_text(stub)
        path.chmod(0o755)
    (folder / "tolerant.sh").write_text(SHELL_FUNCTIONS.read_text())


def _inner_command(
    text: str, script: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    variables = {
        "PATH": "/stubs:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/user",
        "USER": "user",
        "LANG": "C.UTF-8",
        "BASH_ENV": "/stubs/tolerant.sh",
        "REAL_PYTHON": str(Path(sys.executable).resolve()),
        "HOSTNAME": "node0",
        **_of_slurm(text),
        **environment,
    }
    return [f"{name}={value}" for name, value in variables.items()] + [
        "/bin/bash",
        f"/checkout/{script}",
        *arguments,
    ]


def _of_slurm(text: str) -> dict[str, str]:
    """What Slurm would set for the #SBATCH lines of `text`; nothing where it has none."""
    lines = [line for line in text.splitlines() if re.match(r"#+SBATCH\b", line.strip())]
    if not lines:
        return {}
    asked: dict[str, str] = {}
    for line in lines:
        for word in shlex.split(line.split("SBATCH", 1)[1], comments=True):
            name, _, value = word.partition("=")
            asked[name] = value
        for short, long in (("-N", "--nodes"), ("-n", "--ntasks")):
            match = re.search(rf"\s{short}\s*(\d+)", line)
            if match:
                asked[long] = match[1]

    def number(name: str, default: int) -> int:
        match = re.search(r"\d+", asked.get(name, "").split(":")[-1])
        return int(match[0]) if match else default

    nodes = number("--nodes", 1)
    tasks = number("--ntasks-per-node", 1)
    gpus = number("--gpus-per-node", number("--gres", 8))
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1",
        "SLURM_JOB_NAME": asked.get("--job-name", "job") or "job",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(number("--ntasks", nodes * tasks)),
        "SLURM_NPROCS": str(number("--ntasks", nodes * tasks)),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_GPUS_PER_NODE": str(gpus),
        "SLURM_GPUS_ON_NODE": str(gpus),
        "SLURM_CPUS_PER_TASK": str(number("--cpus-per-task", 8)),
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_NODELIST": "node0",
        "SLURM_SUBMIT_DIR": "/checkout",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
