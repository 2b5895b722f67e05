"""Asks a live view over HTTP, and finds Debian's programs that do."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tests import commands

T = TypeVar("T")


def program(name: str, package: str) -> str:
    """Where it is, or the reason why the test is skipped."""
    import pytest

    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package {package})")
    return found


def asked(
    port: int, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def state_of(port: int) -> dict[str, Any]:
    status, _, content = asked(port, "/state")
    assert status == 200, content
    return json.loads(content)


def awaited(look: Callable[[], T | None], seconds: float = 90.0) -> T:
    """The first value that is true."""
    deadline = time.monotonic() + seconds
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)


def page_text(port: int, folder: Path) -> str:
    """The page's DOM once chromium has run its script."""
    words = [program("chromium", "chromium"), "--headless", "--no-sandbox", "--disable-gpu"]
    words += [f"--user-data-dir={folder / 'chromium'}", "--virtual-time-budget=5000"]
    done = commands.subprocess.run(
        [*words, "--dump-dom", f"http://127.0.0.1:{port}/"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
