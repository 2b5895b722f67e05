"""Operations on a store whose host answers, fails, or has been stopped."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hetero.startup import store as store_module
from hetero.startup.store import BoundedStore, StoreHostEnded, WaitReporter
from tests.sentences import without_time


class StoppedStore:
    """As torch's client of a process that has been stopped: no answer until it goes on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def __getattr__(self, operation: str):
        def answer(*arguments: object) -> object:
            self.goes_on.wait(60)
            return getattr(dist.HashStore(), operation)(*arguments)

        return answer


def test_answers_and_errors_are_the_stores_own():
    store = BoundedStore(dist.HashStore(), seconds=30.0)
    store.set("key", "value")
    store.append("key", "s")
    assert store.get("key") == b"values"
    assert store.multi_get(["key"]) == [b"values"]
    assert store.check(["key"])
    assert not store.check(["other"])
    assert store.add("count", 2) == 2
    assert store.compare_set("new", "", "first") == b"first"
    store.wait(["key"], timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError):
        store.wait(["other"], timedelta(milliseconds=10))


def test_no_operation_waits_longer_than_allowed_for_a_host_that_is_stopped():
    stopped = StoppedStore()
    store = BoundedStore(stopped, seconds=0.05)
    with pytest.raises(
        dist.DistNetworkError, match=r"has not answered for 0\.05 s; see whether rank 0"
    ):
        store.check(["key"])
    with pytest.raises(
        dist.DistNetworkError
    ):  # Nor does the next, which the first is still before.
        store.add("count", 1)
    stopped.goes_on.set()
    store._seconds = 30.0
    assert store.add("count", 1) == 1


def test_a_host_that_has_ended_is_told_in_a_sentence():
    class EndedStore:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(StoreHostEnded, match="rank 0 or the launcher, has ended"):
        BoundedStore(EndedStore(), seconds=30.0).check(["key"])


def test_a_wait_ends_when_it_is_aborted_or_times_out():
    checks: list[str] = []

    def check_abort() -> None:
        checks.append("check")
        if len(checks) == 2:
            raise RuntimeError("rank 3 has ended")

    store = BoundedStore(dist.HashStore())
    with pytest.raises(dist.DistStoreError):
        store.wait(["key"], timedelta(milliseconds=10))
    with pytest.raises(RuntimeError, match="rank 3 has ended"):
        store.wait(["key"], timedelta(minutes=5), check_abort=check_abort)
    store.set("key", "value")
    store.wait(["key"], timedelta(seconds=1))


def test_a_wait_that_ends_without_its_key_logs_nothing(capfd: pytest.CaptureFixture[str]):
    """As torch's own does, twice for each second that a rank waits for another."""
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = BoundedStore(hosted)
    capfd.readouterr()
    with pytest.raises(dist.DistStoreError, match="key did not come within"):
        store.wait(["key"], timedelta(milliseconds=50))
    assert capfd.readouterr().err == ""


def test_a_wait_without_a_timeout_has_the_stores_own():
    own = dist.HashStore()
    own.set_timeout(timedelta(milliseconds=20))
    store = BoundedStore(own)
    with pytest.raises(dist.DistStoreError, match=r"key did not come within 0:00:00\.02"):
        store.wait(["key"])
    with pytest.raises(dist.DistStoreError, match="key did not come within 0:00:00"):
        store.wait(["key"], timedelta(0))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_line_is_printed_after_the_first_interval_and_then_at_each_further(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = WaitReporter()
    for now[0] in range(0, 100, 2):
        waiting.report("rank 1")
    said = without_time(capsys.readouterr().err).splitlines()
    assert said == [f"waiting for rank 1, {s} s so far" for s in (10, 30, 60, 90)]


def test_whom_is_called_only_when_a_line_is_due_and_may_skip_it(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = WaitReporter()
    waiting.report(lambda: pytest.fail("it is not due"))
    now[0] = 15.0
    waiting.report(lambda: None)
    assert capsys.readouterr().err == ""
