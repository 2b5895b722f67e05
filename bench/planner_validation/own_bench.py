"""Profiles this machine as two vendors, predicts plans of our own and runs them.

All goes through the commands that users have: tools/profile_layers.py, tools/plan.py and
pretrain_gpt.py, whose files stay in one folder. What is there already is not done again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from bench.parity_benchmark.side_by_side import VISIBLE, gpu_names
from bench.planner_validation.measured_run import CpuContention, MeasuredRun
from bench.planner_validation.own_cases import (
    FACTORS,
    FAST,
    ON_CPU,
    ON_GPU,
    PLANNED,
    SLOW,
    Case,
    Scale,
    cases,
)
from hetero.collectives.links import RING_BYTES
from hetero.errors import HeteroError, UserError
from hetero.link.open import PROBE_SIZES, ChannelOptions
from hetero.plan import load_plan
from hetero.planner.cluster_shape import Cluster, load_cluster
from hetero.planner.layer_profile import MeasuredProfile, load_profile
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.prediction import Prediction, simulate
from hetero.planner.step_costs import step_costs
from hetero.tools.launching.processes import Step, run_step
from hetero.tools.planning.plan_files import training_flags
from hetero.tools.planning.planning_request import merged_profile
from hetero.tools.preflight_checks.network import PathResult, measure_alone
from hetero.tools.runs import SIMULATED, Launch, run_to_end

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]
_TINY = ROOT / "hetero" / "presets" / "tiny.yaml"
_BASE = Case(name="base", factor=1.0, layers=(2, 2))
_BASE_RUN = 4, 4
"""Steps, and samples of a step, of the run that shows what the program itself takes."""
_DEADLINE = 300.0
_WHEN = "before", "after"
"""Of a run on a CPU, its devices are profiled."""


class OwnBench:
    """The files of one validation on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.gpus == 1:
            raise UserError(
                "--own-runs needs two GPUs, and one is visible; make another visible, or set "
                "CUDA_VISIBLE_DEVICES to nothing to run on the CPU"
            )
        self.scale: Scale = ON_GPU if self.gpus else ON_CPU
        self.model_file = folder / "model.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        self.model_file.write_text(yaml.safe_dump(self.scale.flags(), sort_keys=False))

    @property
    def device(self) -> str:
        return torch.cuda.get_device_name() if self.gpus else "CPU"

    @cached_property
    def model(self) -> ModelShape:
        return load_model(str(self.model_file))

    @cached_property
    def profile(self) -> MeasuredProfile:
        """Of each vendor and factor, at all points that plans may need."""
        parts = [(FAST, 1.0), *((SLOW, factor) for factor in FACTORS)]
        files = {part: self._profile_file(part) for part in parts}
        for pair in (parts[:2], parts[2:]):
            missing = {part: files[part] for part in pair if not files[part].exists()}
            self._profile(missing, micro_batches=(1, 2), recompute=("none", "full"))
        return merged_profile(map(load_profile, files.values()))

    def _profile_file(self, part: tuple[str, float], of: str = "") -> Path:
        return self.folder / f"profile_{of}{_accelerator(*part)}.json"

    def _case_profiles(self, case: Case, when: str) -> dict[tuple[str, float], Path]:
        """Of its two devices alone."""
        parts = (FAST, 1.0), (SLOW, case.factor)
        return {part: self._profile_file(part, f"{_slug(case)}_{when}_") for part in parts}

    def _profile(
        self,
        files: Mapping[tuple[str, float], Path],
        *,
        micro_batches: Sequence[int],
        recompute: Sequence[str],
    ) -> None:
        """One or two devices at once: in a run neither is alone either."""
        stop = threading.Event()

        def measure(device: int, part: tuple[str, float], out: Path) -> None:
            vendor, factor = part
            self._tool(
                out.stem,
                *("profile_layers.py", "--out", str(out), "--accelerator", _accelerator(*part)),
                *("--micro-batch", *map(str, micro_batches), "--recompute", *recompute),
                *("--seconds-a-point", str(self.scale.seconds_a_point)),
                *("--yaml-cfg", str(self.model_file)),
                environ=_slowed(factor) | {"HETERO_VENDOR": vendor} | self._visible(device),
                stop=stop,
            )

        with ThreadPoolExecutor() as pool:
            try:
                list(pool.map(measure, range(2), files, files.values()))
            except BaseException:  # an interrupt too; the other one goes with it
                stop.set()
                raise

    def _visible(self, device: int) -> dict[str, str]:
        if not self.gpus:
            return _ONE_THREAD
        return {VISIBLE: gpu_names()[device]}

    def _tool(
        self,
        name: str,
        script: str,
        *words: str,
        environ: Mapping[str, str],
        stop: threading.Event | None = None,
    ) -> None:
        def watch() -> None:
            if stop is not None and stop.is_set():
                raise HeteroError(f"{name} was ended with the one beside it")

        run_step(
            Step(
                name=name,
                command=(sys.executable, str(ROOT / "tools" / script), *words),
                log=self.folder / f"{name}.log",
                directory=Path.cwd(),
                environment=os.environ | dict(environ),
            ),
            watch,
        )

    @cached_property
    def link(self) -> dict[str, float]:
        """Of the path that `auto` takes, by the link benchmark, as a cluster file says it."""
        return measured_link(self.folder / "link.json")

    def cluster_file(self, factor: float) -> Path:
        """Two nodes of one device each, joined by what was measured here."""
        names = {FAST: _accelerator(FAST, 1.0), SLOW: _accelerator(SLOW, factor)}
        data = cluster_mapping(names, self.link, gpus_per_node=1)
        file = self.folder / f"cluster_x{factor:g}.yaml"
        file.write_text(yaml.safe_dump(data, sort_keys=False))
        return file

    @cached_property
    def clusters(self) -> dict[float, Cluster]:
        return {factor: load_cluster(self.cluster_file(factor)) for factor in FACTORS}

    @cached_property
    def cases(self) -> list[Case]:
        return cases(self.scale, {factor: self._planned(factor) for factor in FACTORS[1:]})

    def _planned(self, factor: float) -> Case:
        """What tools/plan.py answers, with the even split's micro-batches and recomputation."""
        out = self.folder / f"plan_x{factor:g}"
        _ = self.profile
        profiles = [self._profile_file(part) for part in ((FAST, 1.0), (SLOW, factor))]
        measured_at = max(file.stat().st_mtime for file in profiles)
        if not out.exists() or out.stat().st_mtime < measured_at:
            self._tool(
                out.name,
                *("plan.py", "--cluster", str(self.cluster_file(factor)), "--out", str(out)),
                *("--model", str(self.model_file), "--profile", *map(str, profiles)),
                *("--global-batch", str(self.scale.global_batch), "--dtype", self.scale.dtype),
                *("--tensor", "1", "--micro-batch", "1", "--recompute", "none"),
                *("--no-replicas", "--no-distributed-optimizer", "--reserved-gib", "0"),
                environ={},
            )
        plan = load_plan(out / "plan.yaml")
        first, second = (sum(chunks) for chunks in plan.layers)
        order = plan.meshes[0].vendor, plan.meshes[1].vendor
        name = f"{PLANNED} x{factor:g}"
        return Case(name=name, factor=factor, layers=(first, second), order=order)

    def predict(self, case: Case) -> list[Prediction]:
        """From profiles alone, of which a CPU has two for each plan: nothing of a run enters."""
        placement, cluster = case.placement(self.scale), self.clusters[case.factor]
        links = self._links_bytes(case, self.model, self.scale.iterations, self.scale.global_batch)
        links -= self._links_bytes(_BASE, _base_model(), *_BASE_RUN)
        options = replace(self.scale.options, reserved_bytes=self.base_bytes + links)
        files = [self._case_profiles(case, when).values() for when in _WHEN]
        measured = (pair for pair in files if all(file.exists() for file in pair))
        own = [merged_profile(map(load_profile, pair)) for pair in measured]
        return [
            simulate(
                step_costs(
                    placement, model=self.model, cluster=cluster, profile=profile, options=options
                ),
                placement,
                model=self.model,
                cluster=cluster,
            )
            for profile in own or [self.profile]
        ]

    def _links_bytes(self, case: Case, model: ModelShape, steps: int, batch: int) -> float:
        """Of the memory that a rank shares with its peer on a CPU, what it touches in a run.

        Each direction is used round, the group's (gradients, or the norm alone) and the pipeline's.
        """
        if self.gpus:
            return 0.0
        probe = sum(PROBE_SIZES)
        element = self.scale.options.activation_bytes
        reduced = 0.0 if case.layers else model.parameters * self.scale.options.gradient_bytes
        touched = min(RING_BYTES["cpu"] // 2, probe + steps * reduced)
        if case.layers:
            crossed = steps * batch * model.boundary_bytes(1, element)
            touched += min(ChannelOptions().ring_bytes // 2, probe + crossed)
        return 2 * touched

    @cached_property
    def base_bytes(self) -> float:
        """What a rank holds beside any model: on a CPU that is the program, which a run shows."""
        if self.gpus:
            return 0.0
        file = self.folder / "base.json"
        if not file.exists():
            steps, batch = _BASE_RUN
            placement = replace(_BASE.placement(self.scale), global_batch=batch)
            plan = self.folder / "base.plan.yaml"
            plan.write_text(yaml.safe_dump(placement.plan.to_mapping()))
            words = [*_words(training_flags(placement, plan)), "--train-iters", str(steps)]
            found = MeasuredRun.of(run_to_end(self._launch("base", [_TINY], words, factor=1.0)))
            file.write_text(json.dumps(found.peak_bytes))
        return max(json.loads(file.read_text()))

    def measure(self, case: Case) -> MeasuredRun:
        """Train a few steps by the public entry point.

        A shared processor's speed drifts by a tenth in minutes, so there the two devices are
        profiled anew just before and just after.
        """
        before, after = _WHEN
        self._profile_beside(case, before)
        found = self._train(case)
        self._profile_beside(case, after)
        return found

    def _profile_beside(self, case: Case, when: str) -> None:
        if not self.gpus:
            self._profile(
                self._case_profiles(case, when),
                micro_batches=(case.micro_batch,),
                recompute=tuple(dict.fromkeys(case.recompute)),
            )

    def _train(self, case: Case) -> MeasuredRun:
        placement = case.placement(self.scale)
        slug = _slug(case)
        plan_file = self.folder / f"{slug}.plan.yaml"
        if not placement.plan.whole_replicas:
            plan_file.write_text(yaml.safe_dump(placement.plan.to_mapping()))
        words = _words(training_flags(placement, plan_file))
        words += ["--train-iters", str(self.scale.iterations)]
        launch = self._launch(slug, [self.model_file], words, factor=case.factor)
        queues = CpuContention(launch)
        run = run_to_end(launch, lambda: None if self.gpus else queues.look())
        return MeasuredRun.of(run, held_up=queues.share)

    def _launch(
        self, name: str, files: Sequence[Path], words: Sequence[str], *, factor: float
    ) -> Launch:
        configured = [word for file in files for word in ("--yaml-cfg", str(file))]
        environ = {**SIMULATED, **_slowed(factor), **({} if self.gpus else _ONE_THREAD)}
        return Launch(
            name=name,
            flags=(*configured, *words),
            nproc=2,
            folder=self.folder,
            environ=environ,
            deadline=_DEADLINE,
        )


def measured_link(file: Path) -> dict[str, float]:
    """Of the path that `auto` takes, by the link benchmark, as a cluster file says it.

    It is measured once and kept in `file`. Raises HeteroError.
    """
    if not file.exists():
        auto = measure_alone(only_chosen=True)[0]
        if auto.error:
            raise HeteroError(f"the link benchmark measured nothing: {auto.error}")
        file.write_text(json.dumps(vars(auto)))
    return PathResult(**json.loads(file.read_text())).rail_figures()


def cluster_mapping(
    accelerators: Mapping[str, str], link: Mapping[str, float], *, gpus_per_node: int
) -> dict[str, Any]:
    """A cluster file's content: for each vendor a node of this machine's devices, called as it.

    `accelerators` has the name of each vendor's in the profile, and `link` joins all devices.
    """
    # Only the vendor and the memory are read of what has a profile and a measured link.
    figures = {"memory": _memory_gib(), "tflops": 1, "memory_bandwidth": 1}
    wires = {"link": link["rail_gbits"] / 8, "nic": link["rail_gbits"]}
    return {
        "nodes": [
            {"name": vendor, "accelerator": name, "gpus_per_node": gpus_per_node, **link}
            for vendor, name in accelerators.items()
        ],
        "accelerators": {
            name: {"vendor": vendor, **figures, **wires} for vendor, name in accelerators.items()
        },
    }


def _memory_gib() -> float:
    """Of one of two devices of this machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**31


def _base_model() -> ModelShape:
    """Its file leaves the vocabulary to the tokenizer, and no link carries that."""
    return load_model(str(_TINY), padded_vocab_size=1)


def _slug(case: Case) -> str:
    return case.name.replace(" ", "_").replace(":", "-")


def _accelerator(vendor: str, factor: float) -> str:
    return f"here-{vendor}-x{factor:g}"


def _slowed(factor: float) -> dict[str, str]:
    return {"HETERO_SLOWDOWN": f"{SLOW}={factor:g}" if factor > 1 else ""}


def _words(flags: Mapping[str, Any]) -> list[str]:
    return [
        word
        for name, value in flags.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
