"""Other planners' searches beside this project's, with planners that print what they are told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench.compare_planners import main
from bench.planner_validation.peer_comparison import Comparison, Theirs
from tests.bench.sailor_checkout import write_checkout

KINDS = ("A100-40", "V100-16")
PLANNER = """
class Config:
    def __init__(self, stages): self.stages = stages
    def get_mbs(self): return 1
    def get_stages(self): return [list(range(layers)) for layers, _ in self.stages]
    def get_config_per_stage(self): return [replicas for _, replicas in self.stages]

class SailorPlanner:
    def __init__(self, *files): pass
    def get_sorted_plans(self, gpus, budget, throughput):
        mixed = Config([(26, [(0, 1, 0), (1, 1, 0)])])
        return [mixed, Config([(20, [(0, 2, 0)]), (6, [(1, 2, 0)])])]
"""
RANKED = """
rank, cost, node_sequence, device_groups, strategies, batches, layers
1, 9.5, (<DeviceType.A100: 'a100'>, <DeviceType.V100: 'v100'>), [4], [(4, 1)], 2, [0, 26]
2, 9.9, (<DeviceType.V100: 'v'>, <DeviceType.A100: 'a'>), [2, 2], [(2, 1), [1, 2]], 4, [0, 7, 26]
"""


@pytest.fixture
def sailor(tmp_path: Path) -> Path:
    checkout = write_checkout(tmp_path / "sailor", kinds=KINDS)
    built = checkout / "sailor" / "Planner" / "sailor_planner" / "cpp_src"
    built.mkdir(parents=True)
    (built / "libplanner.py").write_text(PLANNER)
    return checkout


@pytest.fixture
def metis(tmp_path: Path, sailor: Path) -> Path:
    """It reads profiles that Sailor's checkout holds for it."""
    for kind in KINDS:
        folder = sailor / "sailor/Planner/baselines/Metis/profiles/OPT-350" / kind
        folder.mkdir(parents=True)
        for batch, tensor in itertools.product((1, 2), repeat=2):
            profile = {
                "model": {"parameters": {"parameters_per_layer_bytes": [4e6] * 26}},
                "execution_time": {
                    "forward_backward_time_ms": 26.0 * batch,
                    "optimizer_time_ms": 4.0,
                    "layer_compute_total_ms": [1.0 * batch] * 26,
                },
                "execution_memory": {"layer_memory_total_mb": [10.0 + batch] * 26},
            }
            (folder / f"mbs{batch}_tmp{tensor}.json").write_text(json.dumps(profile))
    checkout = tmp_path / "metis"
    checkout.mkdir()
    (checkout / "cost_het_cluster.py").write_text(f"print({RANKED!r})")
    return checkout


SAILOR, METIS = ("Sailor", "A100-40", "V100-16"), ("Metis", "A100", "V100")


def test_the_tool_prints_a_table_and_writes_all_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = Theirs(2.0, 1.5, 3, first="4 stages", first_step=6.0, best_step=5.0)
    found = Comparison("OPT-350, 8 A100", "Metis", theirs, 0.5, 0.4, 4.0, "A100 2 x TP 1")
    monkeypatch.setattr("bench.compare_planners.compare", lambda **_: [found])
    file = tmp_path / "figures.json"
    assert main(["--sailor", str(tmp_path), "--json", str(file)]) == 0
    assert "Metis: OPT-350, 8 A100" in (said := capsys.readouterr().out)
    assert "1.250" in said
    (written,) = json.loads(file.read_text())
    assert (written["step"], written["theirs"]["best_step"]) == (4.0, 5.0)
