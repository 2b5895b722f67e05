"""What examples say of several nodes, each a host of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from examples.two_stage import train as two_stage
from tests.hosts.network import ROOT, Network
from tests.hosts.runs import Run

TINY = (
    "--num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--num-query-groups 2 --padded-vocab-size 512 --max-position-embeddings 64 "
    "--mock-data --num-workers 0 --tokenizer-type ByteLevelTokenizer --eval-iters 0 "
    "--train-iters 100000"
).split()
SETTINGS = {
    "NODES": "2 1",
    "GPUS": "1",
    "LAYERS": "1 1 1",
    "SEQ_LENGTH": "64",
    "MICRO_BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": "4",
    "DATA_PATH": "unused",
    "PYTHON": sys.executable,
}


def command(node: int, master: str) -> list[str]:
    """What the script would run on a node: its GPUs are not looked for, as there are none."""
    script = ROOT / "examples/llama3_8b/node.sh"
    done = subprocess.run(
        ["bash", str(script), str(node), *TINY, "--dry-run"],
        env={**os.environ, **SETTINGS, "MASTER_ADDR": master},
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(done.stdout)
    # The script insists on data; the flags that were added bring their own.
    data = words.index("--data-path")
    del words[data : data + 2]
    return words[words.index(sys.executable) + 1 :]


def test_three_nodes_train_and_name_the_killed_rank(network: Network, tmp_path: Path) -> None:
    master = network.hosts[0].address()
    run = Run(network.hosts, [command(node, master) for node in range(3)], tmp_path)
    run.wait_for(r"rank 1 \(stage 1\) - rank 2 \(stage 2\): tcp")
    run.wait_for("iteration +2/")
    run.kill(2)
    outcomes = run.end()
    codes, said = [outcome.code for outcome in outcomes], [outcome.output for outcome in outcomes]
    assert codes == [137, 137, 137], said
    for outcome in outcomes:
        assert "rank 2 on hostc (stage 2, amd) was killed by SIGKILL" in outcome.output
    for outcome in outcomes[:2]:
        assert "rank 2 on hostc (stage 2) exited without reporting an error" in outcome.output


def test_two_hosts_train_the_example_of_two_stages_as_it_says(
    network: Network, tmp_path: Path
) -> None:
    examples = (two_stage.__doc__ or "").replace("\\\n", "").splitlines()
    (command,) = [line for line in examples if "--nnodes" in line]
    hosts, master = network.hosts[:2], network.hosts[0].address()
    commands = []
    for node in range(2):
        places = {"N": str(node), "HOST": master, "torchrun": "torch.distributed.run"}
        commands.append(["-m", *(places.get(word, word) for word in shlex.split(command))])
    outcomes = Run(hosts, commands, tmp_path, environs=[{}, {}]).end()
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "stage 0: weights" in outcomes[0].output
    assert "step 49: loss" in outcomes[1].output
