"""docs/benchmarks/search_plans.py: what it refuses before it searches for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import scripts
from tools.runs import ROOT


def test_results_without_a_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = scripts.load(ROOT / "docs" / "benchmarks" / "search_plans.py")
    monkeypatch.setattr("sys.argv", ["search_plans.py", "sum", "--out", f"{tmp_path}/no/sum.json"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert f"there is no folder {tmp_path}/no" in capsys.readouterr().err
