"""The end of a process that has groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch, torch.distributed as dist
import hetero
from hetero.collectives import group_communicator

group_communicator.LOOK_SECONDS = 0.0001
hetero.register()
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("hetero", store=store, rank=int(sys.argv[2]), world_size=2)
for group in [dist.new_group() for _ in range(4)]:
    dist.all_reduce(torch.ones(2), group=group)
if dist.get_rank() == 1:
    dist.recv(torch.empty(1), group=group)
else:
    dist.send(torch.ones(1), dst=1, group=group)
    dist.irecv(torch.empty(1), group=group)  # from any rank; none sends
"""


def test_a_script_may_end_without_destroying_its_groups(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(rank)],
            env=os.environ | {"HETERO_VENDOR": vendor, "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, vendor in enumerate(("nvidia", "amd"))
    ]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert [code for _, code in ends] == [0, 0], ends
