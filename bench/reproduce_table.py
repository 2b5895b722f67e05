"""Run the rows of the published table on the GPUs of this machine, side by side.

    python bench/reproduce_table.py --model llama3_8b --nproc 2 --out runs/table
    python bench/reproduce_table.py --model qwen2_7b --nproc 2 --rows homogeneous device-direct \\
        --rounds 2 --iterations 5 --warmup 1 --out runs/table -- --attention-backend flash

Every row is a run of pretrain_gpt.py on the same model, data and split, and differs from the others
in what carries the tensors between the two stages; what follows `--` goes to all of them. One
machine plays both vendors in all rows but the homogeneous one, which the results call simulated.
Without --data-path the text is Python's language reference. The folder holds table.json, table.md
and table.png, written anew after every row, and each row's log, metrics and report; of runs of 200
steady iterations and more also iterations.png and a table of how steady they were. docs/metrics.md
says what each figure is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.reproduction import steadiness, table, table_picture
from bench.reproduction.measurement import Attempt, summarise
from bench.reproduction.settings import SOURCE, SOURCE_SETTING, VENDORS
from bench.reproduction.table_options import parse_options
from bench.reproduction.table_rows import Options, parsed_row, run_order
from bench.reproduction.training_runs import device_of, is_simulated, record_of, run_all
from hetero.tools import tool_command_line
from hetero.tools.reports.page import write_whole


def write_results(options: Options, attempts: Sequence[Attempt], command: Sequence[str]) -> str:
    """Write the files anew. Returns the text of table.md."""
    results = summarise(attempts, options.setting)
    lines = table.notes(results, attempts, warmup=options.warmup, iterations=options.iterations)
    long_runs = steadiness.steadiness(attempts)
    record = {
        **record_of(options, list(run_order(options)), attempts, command),
        "summary": _summary(options, attempts),
        "layers": options.layers,
        "vendors_by_stage": VENDORS,
        "source_of_published": f"{SOURCE}: {SOURCE_SETTING}",
        "notes": lines,
        "rows": [asdict(result) for result in results],
        "steadiness": [asdict(run) | {"drift": run.drift} for run in long_runs],
    }
    title = f"{options.setting.name} on {record['summary']}"
    text = f"{title}\n\n{table.render(results)}\n\n" + "".join(f"- {line}\n" for line in lines)
    if long_runs:
        text += f"\n{steadiness.render(long_runs)}\n"
        (options.out / "iterations.png").write_bytes(steadiness.draw(attempts, title=title))
    write_whole(options.out / "table.json", json.dumps(record, indent=1) + "\n")
    write_whole(options.out / "table.md", text)
    (options.out / "table.png").write_bytes(
        table_picture.draw(results, title=title, published_label=f"published: {SOURCE_SETTING}")
    )
    return text


def _summary(options: Options, attempts: Sequence[Attempt]) -> str:
    args = parsed_row(options, options.rows[0])
    simulated = ", vendors simulated" if is_simulated(attempts) else ""
    return (
        f"{options.nproc} x {device_of(attempts)} of one machine, TP1 PP{len(VENDORS)} "
        f"DP{options.nproc // len(VENDORS)}, sequence {args.seq_length}, "
        f"micro-batch {args.micro_batch_size}, global batch {args.global_batch_size}{simulated}"
    )


def reproduce(argv: Sequence[str]) -> str:
    """Run all rows. Returns the line for the end."""
    options = parse_options(argv, description=(__doc__ or "").partition("\n")[0])
    command = ("bench/reproduce_table.py", *argv)
    run_all(
        options,
        list(run_order(options)),
        results=options.out / "table.json",
        write=lambda attempts: write_results(options, attempts, command),
    )
    return f"written: table.json, table.md and table.png in {options.out}"


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return tool_command_line.run(lambda: reproduce(words))


if __name__ == "__main__":
    sys.exit(main())
