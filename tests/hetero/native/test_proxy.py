"""The proxy of a process, as Python gets it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero.native import binding
from hetero.native.binding import proxy
from tests.hetero.link.joined import threads_named, wait_for


def test_threads_that_need_it_at_once_get_one_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_proxies", {})
    before = len(threads_named("hetero-proxy"))
    barrier = threading.Barrier(8)

    def get(_: int) -> int:
        barrier.wait(60)
        return proxy()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(get, range(8)))
    assert len(found) == 8
    assert len(set(found)) == 1
    assert wait_for(lambda: len(threads_named("hetero-proxy")) == before + 1)
    binding.native().proxy_free(found[0])
    # A thread is still listed in /proc for a moment after its join has returned.
    assert wait_for(lambda: len(threads_named("hetero-proxy")) == before)


def test_a_forked_child_has_a_proxy_of_its_own() -> None:
    parents = proxy()
    if (child := os.fork()) == 0:
        has_own = proxy() != parents and wait_for(lambda: len(threads_named("hetero-proxy")) == 1)
        os._exit(0 if has_own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
