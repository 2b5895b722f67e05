"""Measuring the links of this machine: contents and reports, never speed."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from tools.preflight_checks.path_bandwidth import End, PathResult, measure_paths

FIGURES = "latency_us", "there_gb_s", "back_gb_s", "both_gb_s"


def ends() -> list[list[PathResult]]:
    """Both ends in threads of this process."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    results: list[list[PathResult]] = [[], []]

    def work(number: int) -> None:
        end = End(
            number=number,
            store=store,
            secret="secret",
            addresses=("127.0.0.1", "127.0.0.2"),
            device=torch.device("cpu"),
        )
        results[number] = measure_paths(end)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    return results


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
