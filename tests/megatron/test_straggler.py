"""--log-straggler: Megatron's lines from each rank's times, and the port that switches them."""

from __future__ import annotations

import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import torch

from hetero.observe.record import recorder
from megatron.hetero.straggler import ControlServer, Stopwatch, read_sensors, straggler_lines
from megatron.hetero.timers import HostClock

NONE = [math.nan] * 4


def test_the_least_and_the_most_of_each_value_are_named_with_their_ranks() -> None:
    rows = [
        [10.0, 300.0, 50.0, 90.0, 1500.0, 2.0, 40.0],
        [30.0, 310.0, 61.0, 91.0, 1400.0, 1.5, 20.0],
        [20.0, 250.0, 55.0, 92.0, 1450.0, 9.0, 30.0],
    ]
    assert straggler_lines(rows, 1) == [
        "MnRtt/Rnk: 10.00ms/0 | MxRtt/Rnk: 30.00ms/1 | MnPwr/Rnk: 250.00W/2 | MxPwr/Rnk: 310.00W/1 "
        "| MnTmp/Rnk: 50.00C/0 | MxTmp/Rnk: 61.00C/1 | MnUtl/Rnk: 90.00%/0 | MxUtl/Rnk: 92.00%/2 "
        "| MnClk/Rnk: 1400.00MHz/1 | MxClk/Rnk: 1500.00MHz/0 | MnDRtt/Rnk: 1.50ms/1 "
        "| MxDRtt/Rnk: 9.00ms/2 | MnEtpt/Rnk: 20.00TF/1 | MxEtpt/Rnk: 40.00TF/0"
    ]


def test_what_no_rank_can_read_is_left_out_and_what_some_cannot_is_of_the_others() -> None:
    rows = [[10.0, *NONE, 2.0, 0.00123], [30.0, math.nan, 61.0, *NONE[:2], 1.5, 0.002]]
    (line,) = straggler_lines(rows, 1)
    assert "Pwr" not in line
    assert "Clk" not in line
    assert "MnTmp/Rnk: 61.00C/1 | MxTmp/Rnk: 61.00C/1" in line
    assert "MnEtpt/Rnk: 0.00123TF/0 | MxEtpt/Rnk: 0.002TF/1" in line


@pytest.mark.parametrize(("count", "listed"), [(1, 0), (2, 2), (3, 2), (4, 0), (9, 0)])
def test_several_ranks_are_listed_where_there_are_more(count: int, listed: int) -> None:
    rows = [[1.0, *NONE, 1.0, throughput] for throughput in (4.0, 1.0, 3.0, 2.0)]
    lines = straggler_lines(rows, count)[1:]
    assert len(lines) == listed
    if count == 2:
        assert lines == [
            "^^^^ Bottom 2 Ranks with lowest  Etpt(TF): 1.00/1, 2.00/3",
            "^^^^ Top    2 Ranks with highest Etpt(TF): 3.00/2, 4.00/0",
        ]


def test_a_stopwatch_times_what_it_is_around_while_it_is_on_and_nothing_is_evaluated() -> None:
    watch = Stopwatch(HostClock())
    with watch:
        pass
    assert watch.take() == []
    watch.is_on = True
    whole = []
    for seconds in (0.02, 0.0):
        begun = time.perf_counter()
        with watch:
            time.sleep(seconds)
        whole.append(1000 * (time.perf_counter() - begun))
    first, second = watch.take()
    assert 20 <= first <= whole[0]
    assert 0 <= second <= whole[1]
    assert watch.take() == []
    recorder().is_evaluating = True
    try:
        with watch:
            pass
        assert watch.take() == []
    finally:
        recorder().is_evaluating = False


def test_a_cpu_has_no_sensors() -> None:
    assert all(math.isnan(value) for value in read_sensors(torch.device("cpu")))


@pytest.mark.gpu
def test_a_gpu_has_those_that_its_library_reads() -> None:
    values = read_sensors(torch.device("cuda"))
    assert all(math.isnan(value) or 0 <= value < 1e5 for value in values)


@pytest.fixture
def switch() -> Iterator[tuple[ControlServer, Callable[..., str]]]:
    server = ControlServer(0, is_on=lambda: False)

    def get(path: str = "/", **headers: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    yield server, get
    server.close()


def test_a_request_switches_at_the_next_report_and_is_answered_as_by_megatron(
    switch: tuple[ControlServer, Callable[..., str]],
) -> None:
    server, get = switch
    assert not server.take_toggle()
    assert get() == "Will turn StragglerDetector ON at next logging interval\n"
    assert server.take_toggle()
    assert not server.take_toggle()


@pytest.mark.parametrize(
    ("path", "headers"), [("/favicon.ico", {}), ("/", {"Origin": "http://elsewhere"})]
)
def test_a_browsers_page_switches_nothing(
    switch: tuple[ControlServer, Callable[..., str]], path: str, headers: dict[str, str]
) -> None:
    server, get = switch
    with pytest.raises(urllib.error.HTTPError):
        get(path, **headers)
    assert not server.take_toggle()


def test_a_port_that_is_taken_is_an_error_of_the_caller() -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(OSError):
        ControlServer(taken.getsockname()[1], is_on=lambda: True)
