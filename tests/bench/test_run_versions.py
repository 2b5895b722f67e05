"""The tests of every release: what ran where, and that no failure is hidden."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.run_versions import Result, require_success, run_suite
from bench.versions.environments import (
    Environment,
)
from hetero.errors import HeteroError

GOOD = Result(release="0.16.1", python="3.11.7", torch="2.13.0+cpu", passed=3, skipped=1)
HERE = Environment(
    release="0.16.1", python="3.11.7", torch="2.13.0", executable=Path(sys.executable)
)


def suite(folder: Path, text: str) -> Result:
    tests = folder / "test_of_a_release.py"
    tests.write_text(f"import pytest\n{text}\n")
    return run_suite(HERE, ["-q", "-p", "no:xdist", str(tests)], folder=folder)


def test_passed_failed_and_skipped_tests_are_counted_and_failures_named(tmp_path: Path) -> None:
    result = suite(
        tmp_path,
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_broken(broken): pass\n"
        "def test_skipped(): pytest.skip()",
    )
    assert (result.passed, result.failed, result.skipped, result.note) == (1, 2, 1, "")
    assert [name.partition("::")[2] for name in result.failures] == ["test_bad", "test_broken"]
    with pytest.raises(HeteroError, match=r"0\.16\.1 on Python 3\.11\.7: 2 failed"):
        require_success([result])


@pytest.mark.parametrize("text", ["import os\ndef test_it(): os._exit(9)", "x = 1"])
def test_a_suite_that_crashes_or_is_empty_has_not_passed(tmp_path: Path, text: str) -> None:
    result = suite(tmp_path, text)
    assert "pytest ended with exit code" in result.note
    with pytest.raises(HeteroError, match="pytest ended with exit code"):
        require_success([GOOD, result])
