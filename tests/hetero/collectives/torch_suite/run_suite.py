"""Runs PyTorch's own distributed tests, from its wheel, on CPU against one backend.

    python -m tests.hetero.collectives.torch_suite.run_suite gloo --results gloo.json
    python -m tests.hetero.collectives.torch_suite.run_suite hetero --results hetero.json

`hetero` runs with two simulated vendors of half the ranks each and takes the place of gloo, so that
the cases which PyTorch writes for gloo alone run too. Events of the profiler are not compared: they
are named after gloo. Processes are forked, since importing torch anew for each of them takes most
of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("backend", choices=("gloo", "hetero"))
    parser.add_argument("--results", type=Path, required=True, help="a JSON file, added to")
    parser.add_argument("--ranks", type=int, default=4, help="8 for what needs that many")
    parser.add_argument("--only", default="", help="a regular expression of names of tests")
    parser.add_argument("--again", action="store_true", help="run also what the file has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    options = parser.parse_args()
    _prepare(options.backend, options.ranks)
    suite = _suite()
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    began = time.monotonic()
    for test in suite:
        name = test._testMethodName
        if not re.search(options.only, name) or (name in known and not options.again):
            continue
        if time.monotonic() - began > options.seconds:
            print("out of time; run again for the rest")
            return 3
        known[name] = _outcome(test)
        print(f"{name}: {known[name]['outcome']} {known[name]['reason'][:200]}", flush=True)
        options.results.write_text(json.dumps(known, indent=1, sort_keys=True))
    counts: dict[str, int] = {}
    for result in known.values():
        counts[result["outcome"]] = counts.get(result["outcome"], 0) + 1
    print(counts)
    return 0


def _prepare(backend: str, ranks: int) -> None:
    """What the tests read from the environment when they are imported."""
    folder = tempfile.mkdtemp(prefix="torch-suite-")
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(ranks),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/shared_init_file",
        GLOO_SOCKET_IFNAME="lo",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
        OMP_NUM_THREADS="1",
    )
    if backend == "hetero":
        vendors = f"nvidia*{ranks // 2},amd*{ranks // 2}"
        os.environ.update(HETERO_VENDOR=vendors, HETERO_INSTEAD_OF="gloo")


def _suite() -> unittest.TestSuite:
    import torch
    from torch.testing._internal.distributed import distributed_test
    from torch.testing._internal.distributed.distributed_test import (
        DistributedTest,
        TestDistBackend,
    )

    torch.set_num_threads(1)
    if os.environ.get("HETERO_INSTEAD_OF"):
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()

    class TestOnCpu(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return unittest.defaultTestLoader.loadTestsFromTestCase(TestOnCpu)


def _outcome(test: unittest.TestCase) -> dict[str, str]:
    result = unittest.TestResult()
    began = time.monotonic()
    test.run(result)
    seconds = f"{time.monotonic() - began:.1f}"
    if result.skipped:
        return {"outcome": "skipped", "reason": result.skipped[0][1], "seconds": seconds}
    if problems := result.failures + result.errors:
        return {"outcome": "failed", "reason": problems[0][1][-2000:], "seconds": seconds}
    return {"outcome": "passed", "reason": "", "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
