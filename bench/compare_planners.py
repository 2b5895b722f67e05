"""Plan beside Metis and Sailor, on their profiles, with all plans in this project's simulator.

    git clone https://github.com/eth-easl/sailor
    git clone https://github.com/SamsungLabs/Metis
    python bench/compare_planners.py --sailor sailor --metis Metis

runs their searches and this project's on problems that their profiles cover. Sailor's planner has
to be built before, so that this Python imports its `libplanner`. What is compared, and how plans
that a plan file cannot say are counted: docs/benchmarks/planner.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False, needs="numpy")

from bench.planner_validation.peer_comparison import compare, table
from hetero.text import number
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.console import progress_bar


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--sailor", type=Path, required=True, metavar="FOLDER", help="a checkout of Sailor"
    )
    parser.add_argument(
        "--metis", type=Path, metavar="FOLDER", help="a checkout of Metis; left out: not compared"
    )
    parser.add_argument(
        "--deadline",
        type=number(above=0),
        default=120.0,
        metavar="SECONDS",
        help="after which another planner's search is given up",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    options = parser.parse_args(argv)
    return run(lambda: _compare(options), interrupted="nothing was written")


def _compare(options: argparse.Namespace) -> str:
    with progress_bar(total=0, leave=False, bar_format="{desc} [{elapsed}]") as bar:
        found = compare(
            metis=options.metis,
            sailor=options.sailor,
            deadline=options.deadline,
            progress=bar.set_description,
        )
    if options.json:
        rows = [asdict(one) for one in found]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return "\n".join(table(found))


if __name__ == "__main__":
    sys.exit(main())
