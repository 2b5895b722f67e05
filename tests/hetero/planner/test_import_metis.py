"""Metis' profile files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.planner.import_metis import import_metis
from hetero.planner.layer_profile import Point, ProfileError


def write(folder: Path, name: str, *, batch: int, **changed: object) -> None:
    times: dict[str, object] = {
        "forward_backward_time_ms": 100.0 * batch,
        "optimizer_time_ms": 12.0,
        "layer_compute_total_ms": [1.0 * batch, 30.0 * batch, 30.0 * batch, 3.0 * batch],
        **changed,
    }
    data = {
        "model": {"parameters": {"parameters_per_layer_bytes": [4e6, 8e6, 8e6, 4e6]}},
        "execution_time": times,
        "execution_memory": {"layer_memory_total_mb": [10, 50 + 5 * batch, 50 + 5 * batch, 20]},
    }
    (folder / name).write_text(json.dumps(data))


def test_times_of_both_passes_are_divided_and_growing_memory_is_activations(tmp_path: Path) -> None:
    write(tmp_path, "DeviceType.A100_tp1_bs1.json", batch=1)
    write(tmp_path, "DeviceType.A100_tp1_bs4.json", batch=4)
    (tmp_path / "notes.json").write_text("{}")
    profile = import_metis(tmp_path, seq_length=1024)
    costs = profile.costs("A100", Point(1, 4, 1024))
    assert costs.layer.forward == pytest.approx(0.04)
    assert costs.layer.backward == pytest.approx(0.08)
    # What lies between the passes is the loss.
    assert costs.head.forward + costs.head.backward == pytest.approx(0.012 + 0.4 - 0.256)
    assert costs.layer_activation_bytes == pytest.approx(4 * 5 * 2**20)
    assert profile.optimizer_seconds("A100", 6e6) == pytest.approx(0.012)


def test_a_folder_without_profiles_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"holds no file named like DeviceType.A100"):
        import_metis(tmp_path, seq_length=1024)
    (tmp_path / "DeviceType.A100_tp1_bs1.json").write_text("{}")
    with pytest.raises(ProfileError, match="is damaged or not of this kind: KeyError"):
        import_metis(tmp_path, seq_length=1024)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_compute_total_ms": [1.0, -30.0, -30.0, 3.0]},
        {"layer_compute_total_ms": [1.0, 30.0, 3.0]},
        {"forward_backward_time_ms": float("nan")},
        {"optimizer_time_ms": -1.0},
    ],
)
def test_figures_that_cannot_be_measured_are_refused(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    write(tmp_path, "DeviceType.A100_tp1_bs1.json", batch=1, **changed)
    with pytest.raises(ProfileError):
        import_metis(tmp_path, seq_length=1024)
