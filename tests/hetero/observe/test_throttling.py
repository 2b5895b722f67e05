"""A GPU whose driver slows its clocks for its temperature; the drivers are played."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from hetero.observe.record import THROTTLED, Recorder
from hetero.observe.throttling import ThrottleWatch, reader_for

GPU = torch.device("cuda", 0)


def played(reasons: list[str]) -> list[str]:
    """The texts of the incidents, after as many looks."""
    record, left = Recorder(), list(reasons)
    watch = ThrottleWatch(record, lambda: left.pop(0))
    for _ in reasons:
        watch.look()
    incidents = record.incidents()
    assert {incident["kind"] for incident in incidents} <= {THROTTLED}
    return [str(incident["text"]) for incident in incidents]


def test_it_is_told_once_when_two_looks_in_a_row_find_it() -> None:
    hot = "hardware thermal slowdown, at 91 C"
    assert played(["", hot, "", hot, hot, hot, "", hot, hot]) == [
        f"its GPU slows its clocks: {hot}"
    ]


def test_a_moment_of_it_is_not_told() -> None:
    assert played(["", "hot", "", "hot", ""]) == []


def test_a_driver_that_fails_ends_the_watch_and_nothing_else() -> None:
    looks: list[int] = []

    def read() -> str:
        looks.append(1)
        raise RuntimeError("no permission")

    watch = ThrottleWatch(Recorder(), read)
    watch.look()
    watch.look()
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("bits", "reason"),
    [
        (0x0, ""),
        (0x4, ""),
        (0x40 | 0x4, "hardware thermal slowdown, at 91 C"),
        (0x20, "software thermal slowdown, at 91 C"),
    ],
)
def test_nvidia_s_reasons_are_named_and_a_power_cap_is_none(
    monkeypatch: pytest.MonkeyPatch, bits: int, reason: str
) -> None:
    library = SimpleNamespace(
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: bits,
        nvmlDeviceGetTemperature=lambda handle, sensor: 91,
        NVML_TEMPERATURE_GPU=0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda device: "handle")
    read = reader_for(GPU)
    assert read is not None
    assert read() == reason


def test_amd_s_reasons_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"active_hbm_thrm": True, "active_ppt_pwr": True, "active_vr_thrm": "N/A"}
    library = SimpleNamespace(amdsmi_get_violation_status=lambda handle: status)
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "_get_amdsmi_handler", lambda device: "handle")
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 95)
    read = reader_for(GPU)
    assert read is not None
    assert read() == "memory temperature, at 95 C"


def test_without_a_gpu_or_its_package_there_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert reader_for(torch.device("cpu")) is None
    assert reader_for(GPU) is None
