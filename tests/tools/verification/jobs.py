"""Jobs and nodes that are made up, for what `hetero verify` makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero.tools.verification.job import Job, NodeFacts, Nodes, Options

SOFTWARE = {"project": "0.1.0 (1a2b)", "torch": "2.13.0", "torch_build": "cpu", "python": "3.11.7"}
SOFTWARE |= {"megatron_core": "0.16.1"}


def facts(number: int = 0, **changed: Any) -> NodeFacts:
    """Of a CPU node that plays amd (node 0) or nvidia."""
    made = NodeFacts(
        host=f"gpu-host-{number}.example.org",
        identity=f"gpu-host-{number} boot{number} net",
        boot=f"boot{number}",
        actual_vendor="cpu",
        vendors=(("amd", "nvidia")[number],),
        gpus=(),
        software=SOFTWARE,
        addresses={"lo": ["127.0.0.1"], f"ens{number}f1": [f"10.4.7.{number + 1}", "fd00::7"]},
        rdma=(),
        processor="x86_64",
        kernel="6.18.44",
        user="someone",
        places={"OUT": "/scratch/someone/verify", "HOME": "/home/someone"},
    )
    return replace(made, **changed)


def options(out: Path, **changed: Any) -> Options:
    made = Options(
        nnodes=1,
        nproc_per_node=1,
        master_addr="10.4.7.1",
        master_port=29500,
        vendors=(),
        nics=(),
        node_rank=0,
        out=out,
        names=False,
    )
    return replace(made, **changed)


def job(out: Path, *of: NodeFacts, **changed: Any) -> Job:
    """Of node 0, which speaks with nobody."""
    nodes = Nodes(number=0, count=1, master="", port=0)
    return Job(options(out, **changed), nodes, of or (facts(0), facts(1)))
