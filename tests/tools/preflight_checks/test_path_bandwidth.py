"""Measuring the links of this machine: contents and reports, never speed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero.tools.preflight_checks.path_bandwidth import End, PathResult, measure_paths

FIGURES = "latency_us", "there_gb_s", "back_gb_s", "both_gb_s"


def ends() -> list[list[PathResult]]:
    """Both ends in threads of this process."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    addresses = ("127.0.0.1", "127.0.0.2")

    def measured(number: int) -> list[PathResult]:
        device = torch.device("cpu")
        end = End(number=number, store=store, secret="secret", addresses=addresses, device=device)
        return measure_paths(end)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(measured, range(2), timeout=100))


def test_auto_every_rail_and_all_rails_together_are_measured():
    first, second = ends()
    labels = [result.path for result in first]
    assert labels == [result.path for result in second]
    assert labels[0].startswith("auto: ")
    assert labels[-3:] == ["tcp 1", "tcp 2", "tcp"]
    for result in first:
        assert result.error == ""
        assert min(vars(result)[figure] for figure in FIGURES) > 0
        rail = result.rail_figures(rails=2)
        one_way = 4 * min(result.there_gb_s, result.back_gb_s)
        assert rail["rail_both_ways_gbits"] <= rail["rail_gbits"] == one_way
