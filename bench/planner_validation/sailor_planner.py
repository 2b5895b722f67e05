"""Sailor's own search (SOSP'25), run from a checkout in which it has been built.

Its planner is C++ that Python imports as `libplanner`; it runs in a process of its own, which is
this file as a script, as it may abort.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ZONE = "us-central1-a"
_LOOKED_AT = 500
"""Of the plans that it returns, the best by its own cost."""


def run_sailor(
    model: str,
    gpus: dict[str, int],
    global_batch: int,
    *,
    sailor: Path,
    folder: Path,
    deadline: float,
) -> dict[str, Any]:
    """What `_search` wrote; {"failed": why} where it did not end well in time."""
    result = folder / "plans.json"
    asked = {"model": model, "gpus": gpus, "global_batch": global_batch}
    command = [sys.executable, __file__, str(sailor), str(folder), json.dumps(asked)]
    try:
        ended = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=deadline
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no plan in {deadline:g} s"}
    if not result.exists():
        said = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"failed": f"exit code {ended.returncode}: {' '.join(said)}"}
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


def _search(sailor: Path, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the search, reading its files included, by the clock and of one core; and plans.

    A plan is its micro-batch and its stages: layers, and for each replica GPU and tensor size.
    """
    root, model, gpus = sailor / "sailor", asked["model"], asked["gpus"]
    sys.path.append(str(root / "Planner" / "sailor_planner" / "cpp_src"))
    library = importlib.import_module("libplanner")
    quotas, training = folder / "quotas.json", folder / "training.json"
    quotas.write_text(json.dumps({name: {_ZONE: count} for name, count in gpus.items()}))
    described = {"model": model, "optimizer": "Adam", "num_layers": 24}
    training.write_text(json.dumps(described | {"global_batch_size": asked["global_batch"]}))
    begin, core = time.monotonic(), time.process_time()
    planner = library.SailorPlanner(
        f"{root}/Planner/sailor_planner/profiles/{model}/",
        f"{root}/providers/multizone_bandwidths_het.json",
        str(training),
        f"{root}/Planner/llm_info.json",
        f"{root}/providers/gcp/communication_cost.json",
        True,
        False,
        str(quotas),
        "throughput",
    )
    configurations = planner.get_sorted_plans({_ZONE: gpus}, 0.0, 0.0)
    took = {"seconds": time.monotonic() - begin, "core_seconds": time.process_time() - core}
    names = sorted(gpus)
    plans = [
        {
            "micro_batch": one.get_mbs(),
            "stages": [
                [len(layers), [(names[gpu], tensor) for gpu, tensor, _ in replicas]]
                for layers, replicas in zip(
                    one.get_stages(), one.get_config_per_stage(), strict=True
                )
            ],
        }
        for one in configurations[:_LOOKED_AT]
    ]
    return took | {"plans": plans}


def main(argv: Sequence[str]) -> int:
    sailor, folder, asked = Path(argv[0]), Path(argv[1]), json.loads(argv[2])
    (folder / "plans.json").write_text(json.dumps(_search(sailor, folder, asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
