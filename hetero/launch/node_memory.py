"""The memory of a node's accelerators, as a launcher learns it, which never starts their runtime.

`python -m hetero.launch.node_memory` is the process that does and prints what it finds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

_SECONDS = 120.0
"""For the process to import PyTorch and to start the runtime."""


@dataclass(frozen=True)
class NodeMemory:
    """What each process of a node has."""

    accelerator: str = ""
    """The driver's name of its GPU; empty without one."""
    bytes: int = 0
    """Of the GPU that has least; without a GPU, of the host's memory in equal parts."""

    @classmethod
    def read(cls, processes: int) -> NodeMemory:
        """Takes seconds where PyTorch is built for GPUs."""
        if torch.version.cuda or torch.version.hip:
            with suppress(OSError, subprocess.SubprocessError, ValueError, TypeError):
                found = subprocess.run(
                    [sys.executable, "-m", "hetero.launch.node_memory"],
                    stdout=subprocess.PIPE,
                    timeout=_SECONDS,
                    check=True,
                )
                gpus = json.loads(found.stdout)
                if gpus:
                    name, size = min(gpus[:processes], key=lambda gpu: gpu[1])
                    shared = -(-processes // len(gpus))
                    return cls(name, size // shared)
        return cls("", psutil.virtual_memory().total // processes)


def main() -> None:
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append((properties.name, properties.total_memory))
    print(json.dumps(gpus))


if __name__ == "__main__":
    main()
