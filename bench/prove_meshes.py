"""Prove that meshes of different shapes compute what one process does, on the machine at hand.

Runs pretrain_gpt.py over plans whose meshes have tensor- and data-parallel sizes of their own, in
float32, and compares losses, gradient norms, all gradients, and the bytes over boundaries:

    python bench/prove_meshes.py --out runs/meshes
    python bench/prove_meshes.py --only "TP2 DP1 (2) / TP1 DP2 (2)"
    python bench/prove_meshes.py --device cuda

One machine plays all vendors: the result says `simulated`. Ranks share GPUs where there are fewer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import torch
import yaml

from bench.mesh_matrix.cases import Case, all_cases
from bench.mesh_matrix.comparison import LIMITS, Differences, compare, norm_difference
from bench.real_text.data_set import build_real_text
from hetero.errors import UserError
from hetero.tools import tool_command_line
from hetero.tools.reports.page import write_whole
from hetero.tools.runs import SIMULATED, Finished, Launch, run_to_end

FIRST_STEP = "iter_0000001"
ENVIRONMENTS = {"cpu": {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}, "cuda": {}}
"""Of runs on each device."""


class Proof:
    """Runs cases in a folder, and the runs of one process that they are compared with."""

    def __init__(self, data_flags: Sequence[str], folder: Path, *, device: str) -> None:
        self._data_flags, self._folder = tuple(data_flags), folder
        self._environ = {**ENVIRONMENTS[device], "OMP_NUM_THREADS": "1"}
        self._references: dict[str, tuple[Finished, Path]] = {}

    def differences(self, case: Case) -> Differences:
        model = case.model_flags
        if model not in self._references:
            self._references[model] = self._run(f"reference{len(self._references)}", model, ranks=1)
        plan = self._folder / "plan.yaml"
        plan.write_text(yaml.safe_dump(case.plan.to_mapping()))
        flags = f"{model} --hetero-pipeline --hetero-plan {plan}"
        if case.plan.chunks > 1:
            flags += f" --num-virtual-stages-per-pipeline-rank {case.plan.chunks}"
        ranks = case.plan.world_size
        run, saved = self._run("case", flags, ranks=ranks)
        reference, saved_reference = self._references[model]
        found = compare(
            run,
            reference,
            saved=saved / FIRST_STEP,
            saved_reference=saved_reference / FIRST_STEP,
            expected_bytes=case.bytes_of_tensors,
        )
        step = found.worst_norm_step
        if found.norm <= LIMITS["norm"] or step < 2:
            return found
        # Adam may have amplified rounding: the step once more, from the weights of one process.
        resumed = f"--load {saved_reference} --ckpt-step {step - 1} --exit-interval {step}"
        again, _ = self._run("resumed", f"{flags} {resumed}", ranks=ranks)
        return replace(found, norm_resumed=norm_difference(again, reference, step=step))

    def _run(self, name: str, flags: str, *, ranks: int) -> tuple[Finished, Path]:
        """The run, and the checkpoints of its steps."""
        saves = self._folder / f"{name}.checkpoints"
        shutil.rmtree(saves, ignore_errors=True)
        words = (*flags.split(), *self._data_flags, "--save", str(saves), "--save-interval", "1")
        launch = Launch(
            name=name,
            flags=words,
            nproc=ranks,
            folder=self._folder,
            environ=self._environ | (SIMULATED if ranks > 1 else {}),
            deadline=600,
        )
        return run_to_end(launch), saves


def prove(cases: Sequence[Case], out: Path, *, device: str = "cpu") -> bool:
    """Run all, and write `meshes.json` and `meshes.md`; whether each computed the same."""
    found: list[tuple[Case, Differences]] = []
    with tempfile.TemporaryDirectory(prefix="meshes-") as folder:
        proof = Proof(build_real_text(Path(folder)).flags, Path(folder), device=device)
        for case in cases:
            found.append((case, proof.differences(case)))
            print(_row(*found[-1]), flush=True)
            _write(found, out, device=device)
    return all(differences.is_equal for _, differences in found)


def _row(case: Case, d: Differences) -> str:
    verdict = "equal" if d.is_equal else "**differs**"
    resumed = "" if d.norm_resumed is None else f" ({d.norm_resumed:.1e})"
    return (
        f"| {case.name} | {case.plan.world_size} | {d.loss:.1e} | {d.norm:.1e}{resumed} "
        f"| {d.gradients:.1e} "
        f"| {d.bytes_ratio:g} | {verdict} |"
    )


def _write(found: Sequence[tuple[Case, Differences]], out: Path, *, device: str) -> None:
    records = [
        {"case": case.name, "plan": case.plan.to_mapping(), **differences.as_json()}
        for case, differences in found
    ]
    result = {"simulated": True, "device": device, "cases": records}
    write_whole(out / "meshes.json", json.dumps(result, indent=1) + "\n")
    head = [
        "| meshes (layers of each stage) | ranks | loss | norm | gradients | bytes | |",
        "|---|---|---|---|---|---|---|",
    ]
    write_whole(out / "meshes.md", "\n".join([*head, *(_row(*one) for one in found)]) + "\n")


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="cases whose name holds this; left out: all")
    parser.add_argument(
        "--device", choices=ENVIRONMENTS, default="cpu", help="cuda: GPUs of CUDA or ROCm"
    )
    parser.add_argument("--out", default="runs/meshes", help="folder for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    agreed: list[bool] = []

    def work() -> str:
        cases = [case for case in all_cases() if (options.only or "") in case.name]
        if not cases:
            raise UserError(f"no case's name holds {options.only!r}; leave --only out to see all")
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda needs a GPU and this machine shows none; leave it out")
        out = tool_command_line.make_results_folder(options.out)
        agreed.append(prove(cases, out, device=options.device))
        return f"written: meshes.json and meshes.md in {options.out}; vendors simulated"

    code = tool_command_line.run(work)
    return code or int(not all(agreed))


if __name__ == "__main__":
    sys.exit(main())
