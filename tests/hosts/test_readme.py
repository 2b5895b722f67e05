"""README's commands for two nodes, pasted into a shell of each of two hosts."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import preloaded
from tests.examples.test_readme import block, pasted
from tests.hosts.network import Host, Network

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

NODES = "--hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1\n"
"""At the end of the one complete command."""


def paste(
    host: Host, number: int, commands: str, folder: Path, master: str
) -> subprocess.Popen[str]:
    """On a node of one vendor (simulated), on the CPU, where N and HOST are set."""
    environ = preloaded.as_interpreter(folder) | {preloaded.ADDRESS: host.server_address()}
    words = f"cd {shlex.quote(str(folder))} && {commands}"
    return subprocess.Popen(
        host.command(["bash", "-euo", "pipefail", "-c", words]),
        env=os.environ
        | environ
        | {
            "N": str(number),
            "HOST": master,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(environ['PYTHON_EXEC']).parent}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "-1",
            "HETERO_VENDOR": ("nvidia", "amd")[number],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_complete_command_for_two_nodes_trains(network: Network, tmp_path: Path) -> None:
    """On the files that the lines above it make."""
    pair, folder = network.hosts[:2], tmp_path
    pasted(block("preprocess_data.py"), folder)
    command = block("--data-path data_text_document")
    assert command.endswith(NODES)
    runs = [
        paste(host, number, command, folder, pair[0].address()) for number, host in enumerate(pair)
    ]
    said = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert "iteration       20/      20" in said[0]
    assert "rank 0 (stage 0) - rank 1 (stage 1): tcp" in said[0]
