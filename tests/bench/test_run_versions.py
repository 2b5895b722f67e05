"""The tests of every release: what ran where, and that no failure is hidden."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.run_versions import FAST, Result, parse_options, render, require_success, run_suite
from bench.versions.environments import (
    Environment,
    NotMade,
    make_environments,
    reason_of,
    shared_requirements,
)
from hetero.errors import HeteroError

GOOD = Result(release="0.16.1", python="3.11.7", torch="2.13.0+cpu", passed=3, skipped=1)
OTHER = replace(GOOD, release="0.19.0", python="3.12.1")
NOT_MADE = Result(release="0.19.0", python="python3.13", note="there is no python3.13 on the path")
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


def test_a_release_needs_one_python_on_which_it_ran() -> None:
    require_success([GOOD, OTHER, NOT_MADE])
    with pytest.raises(HeteroError, match=r"0\.19\.0 ran on no Python"):
        require_success([GOOD, NOT_MADE])


def test_the_table_says_why_an_environment_was_not_made() -> None:
    good, not_made = render([GOOD, NOT_MADE]).splitlines()[2:]
    assert good == "| 0.16.1 | 3.11.7 | 2.13.0+cpu | 3 | 0 | 1 |  |"
    assert "| not run |" in not_made
    assert NOT_MADE.note in not_made


def test_words_after_two_dashes_are_pytests() -> None:
    options, words = parse_options(["--releases", "0.19.0", "--", "tests/megatron", "-x"])
    assert (options.releases, words) == (["0.19.0"], ["tests/megatron", "-x"])
    assert parse_options([])[1] == list(FAST)


def test_a_python_that_is_not_there_makes_none_of_the_releases(tmp_path: Path) -> None:
    made = list(make_environments(["0.16.1", "0.19.0"], ["python9.9"], folder=tmp_path))
    assert made == [
        NotMade(release=release, python="python9.9", reason="there is no python9.9 on the path")
        for release in ("0.16.1", "0.19.0")
    ]


def test_pips_reason_has_no_list_of_versions() -> None:
    errors = [
        "ERROR: Ignored the following versions that require a different python version: 0.17.0",
        "ERROR: Could not find a version that satisfies the requirement megatron-core==0.17.0 "
        "(from versions: 0.1.0, 0.16.1)",
        "ERROR: No matching distribution found for megatron-core==0.17.0",
    ]
    said = "Could not find a version that satisfies the requirement megatron-core==0.17.0"
    assert reason_of(errors) == said


def test_releases_share_all_requirements_but_megatron_core() -> None:
    names = " ".join(shared_requirements())
    assert "megatron-core" not in names
    for name in ("torch>=", "pytest>=", "transformers>="):
        assert name in names
