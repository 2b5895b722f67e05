"""What a rank does on a signal: note it, leave it to its parent, or end."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from megatron.hetero import stop_signals
from megatron.hetero.stop_signals import SignalEnd, StopCheck, StopSignals


class Ended:
    """In place of the end of the process: keeps what it was to end for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.came = threading.Event()
        self.unresponsive: str | None = None

    def __call__(self, number: signal.Signals, reason: str) -> None:
        self.reasons.append(reason)
        self.came.set()

    def reason(self) -> str:
        assert self.came.wait(60)
        return self.reasons[0]


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short waits; and handlers as they were, also of a shell that ignores the interrupt."""
    monkeypatch.setattr(stop_signals, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(stop_signals, "_UNRESPONSIVE_SECONDS", 0.2)
    monkeypatch.setattr(stop_signals, "_UNWINDING_SECONDS", 0.2)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) in (handler, signal.SIG_IGN)
        signal.signal(number, handler)


def serve(signals: StopSignals, ended: Ended, *, chosen: str | None) -> None:
    signals.serve(chosen=chosen, end=ended, unresponsive=lambda: ended.unresponsive)


def wait_until_seen(signals: StopSignals) -> signal.Signals:
    deadline = time.monotonic() + 60
    while signals.seen is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return signals.seen


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_every_signal_is_noted_if_the_run_saves(ended: Ended, sent: str) -> None:
    with StopSignals() as signals:
        serve(signals, ended, chosen="SIGUSR1")
        signals.begin()
        signal.raise_signal(signal.Signals[sent])
        assert wait_until_seen(signals).name == sent
    assert not ended.reasons


def test_a_signal_before_the_flags_are_read_is_noted_afterwards(ended: Ended) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        serve(signals, ended, chosen="SIGTERM")
        assert wait_until_seen(signals) == signal.SIGTERM


def test_an_early_signal_ends_a_run_that_does_not_save(ended: Ended) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SignalEnd, match="ended by SIGTERM"):
            serve(signals, ended, chosen=None)


def test_without_a_handler_the_main_thread_is_interrupted_once(ended: Ended) -> None:
    with StopSignals() as signals:
        serve(signals, ended, chosen=None)
        with pytest.raises(SignalEnd, match="ended by SIGHUP"):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert ended.reason() == "ended by SIGHUP"  # as the main thread does not


def test_a_signal_does_not_interrupt_the_report_of_a_failure(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "_UNWINDING_SECONDS", 0.1)
    with StopSignals() as signals:
        serve(signals, ended, chosen=None)
        signals.stop_raising()
        signal.raise_signal(signal.SIGTERM)
        assert ended.reason() == "ended by SIGTERM"  # as a report that takes too long


def test_a_second_signal_ends_the_rank_unless_it_is_the_same(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StopSignals() as signals:
        serve(signals, ended, chosen="SIGTERM")
        signals.begin()
        signal.raise_signal(signal.SIGTERM)
        wait_until_seen(signals)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert not ended.came.wait(0.5)
        monkeypatch.setattr(stop_signals, "_SAME_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert ended.reason() == "ended by a second SIGTERM; nothing more was saved"


def test_a_signal_that_comes_again_does_not_end_a_process_that_exits(ended: Ended) -> None:
    """As where a launcher forwards what every process of a step has been sent already."""
    with StopSignals() as signals:
        serve(signals, ended, chosen="SIGUSR1")
        os.kill(os.getpid(), signal.SIGHUP)
        assert wait_until_seen(signals) == signal.SIGHUP
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_start_up_that_takes_too_long_ends(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "_START_UP_SECONDS", 0.2)
    with StopSignals() as signals:
        serve(signals, ended, chosen="SIGTERM")
        signal.raise_signal(signal.SIGTERM)
        assert ended.reason().startswith("ended by SIGTERM before the first step, which did not")


def test_a_rank_that_does_not_respond_is_named(ended: Ended) -> None:
    with StopSignals() as signals:
        serve(signals, ended, chosen="SIGTERM")
        signals.begin()
        ended.unresponsive = "rank 1 on b was last heard 9 s ago"
        signal.raise_signal(signal.SIGTERM)
        assert ended.reason() == (
            "ended by SIGTERM; nothing was saved, because rank 1 on b was last heard 9 s ago"
        )


def test_an_ignored_signal_stays_ignored_unless_it_is_chosen(ended: Ended) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            serve(signals, ended, chosen="SIGTERM")
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        with StopSignals() as signals:
            serve(signals, ended, chosen="SIGHUP")
            signal.raise_signal(signal.SIGHUP)
            assert wait_until_seen(signals) == signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_process_leaves_signals_to_its_parent(ended: Ended) -> None:
    with StopSignals() as signals:
        serve(signals, ended, chosen="SIGTERM")
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as PyTorch does in data workers
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not ended.came.wait(0.2)
        assert signals.seen is None


def test_a_run_stops_by_the_signal_of_any_rank() -> None:
    def gather(values: Sequence[float]) -> list[list[float]]:
        return [[0.0, 1.0], [float(15), 1.0]]

    signals = StopSignals()
    assert not StopCheck(gather, signals=None, minutes=None, start_time=0.0).agree()
    stop = StopCheck(gather, signals=signals, minutes=None, start_time=0.0)
    assert stop.own_signal == 0
    assert stop.agree()
    assert stop.reason == "SIGTERM"


def test_an_end_that_follows_from_the_launchers_names_the_launcher(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launcher = os.getppid()
    with StopSignals() as signals:
        signals.serve(chosen=None, end=lambda *_: None, unresponsive=lambda: None)
        # It is still there when the signal comes, and gone a moment later.
        parents = itertools.chain([launcher, launcher], itertools.repeat(1))
        monkeypatch.setattr(os, "getppid", lambda: next(parents))
        with pytest.raises(
            SignalEnd, match=rf"its launcher, process {launcher} on \S+, was killed"
        ):
            signal.raise_signal(signal.SIGTERM)
