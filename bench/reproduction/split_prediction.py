"""What the planner predicts for the runs of a sweep, from one profile of this machine's device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.planner_validation.own_bench import cluster_mapping, measured_link
from bench.reproduction.run_options import RunOptions, all_flags, parsed, require_memory
from bench.reproduction.settings import VENDORS
from bench.reproduction.training_runs import PlannedRun
from hetero import cli
from hetero.data.slowdown import SLOWDOWN_VARIABLE, slowdown_factors
from hetero.plan import VENDOR_VARIABLE, Plan
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.layer_profile import MeasuredProfile, Profile, SlowedProfile, load_profile
from hetero.planner.model_shape import model_shape
from hetero.planner.placement import Placement
from hetero.planner.prediction import simulate
from hetero.planner.step_costs import step_costs
from hetero.planner.training_options import TrainingOptions
from hetero.tools.launching.processes import Step, run_step
from megatron.hetero.arguments import Configuration, read_command_line

ACCELERATORS = {vendor: f"here-{vendor}" for vendor in VENDORS}
"""One device plays both vendors: the profile has it under two names."""


def predictions(options: RunOptions, runs: Sequence[PlannedRun], *, nproc: int) -> dict[str, float]:
    """Tokens/s of each run, by its row.

    Profiles a device with `hetero profile-layers` and measures the link, into two files that
    --resume finds again. Of no training run is anything read. Raises HeteroError, and UserError
    where this machine cannot hold the model.
    """
    require_memory(options.setting, options.extra)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for file in ("profile.json", "link.json"):
            (options.out / file).unlink(missing_ok=True)
    profile = _profile(options, nproc=nproc)
    link = measured_link(options.out / "link.json")
    return {run.row: _tokens_per_s(options, run, profile, link, nproc=nproc) for run in runs}


def _profile(options: RunOptions, *, nproc: int) -> MeasuredProfile:
    """The device's costs at the point of the runs, under both vendors' names."""
    file = options.out / "profile.json"
    args = parsed(options, (), nproc=1)
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    if not file.exists():
        words = [
            *("--out", str(file), "--accelerator", ACCELERATORS[VENDORS[0]]),
            *("--micro-batch", str(args.micro_batch_size), "--recompute", _recompute(args)),
            *("--tensor", str(args.tensor_model_parallel_size), "--threads", str(threads)),
        ]
        step = Step(
            name="profile-layers",
            command=(
                *(sys.executable, *cli.rank_command("profile-layers"), *words),
                *all_flags(options, (), data=["--mock-data"]),
            ),
            log=options.out / "profile.log",
            directory=Path.cwd(),
            environment=cli.rank_environment(
                os.environ | {"OMP_NUM_THREADS": str(threads), SLOWDOWN_VARIABLE: ""}
            ),
        )
        run_step(step)
    (measured,) = load_profile(file).accelerators.values()
    return MeasuredProfile(dict.fromkeys(ACCELERATORS.values(), measured))


def _recompute(args: argparse.Namespace) -> str:
    return args.recompute_granularity or "none"


def _tokens_per_s(
    options: RunOptions,
    run: PlannedRun,
    profile: MeasuredProfile,
    link: Mapping[str, float],
    *,
    nproc: int,
) -> float:
    flags = all_flags(options, run.flags, data=["--mock-data"])
    configured = read_command_line(flags, world_size=nproc)
    args, plan = configured.args, _with_played_vendors(configured, run)
    model = model_shape(args)
    cluster = cluster_from_mapping(
        cluster_mapping(ACCELERATORS, link, gpus_per_node=nproc), source="this machine"
    )
    placement = Placement(plan, tuple(mesh.vendor for mesh in plan.meshes), args.global_batch_size)
    slowed: Profile = profile
    for vendor, factor in slowdown_factors(run.environ[SLOWDOWN_VARIABLE]).items():
        slowed = SlowedProfile(slowed, frozenset({ACCELERATORS[vendor]}), factor)
    costs = step_costs(
        placement,
        model=model,
        cluster=cluster,
        profile=slowed,
        options=TrainingOptions.of_flags(vars(args)),
    )
    return simulate(costs, placement, model=model, cluster=cluster).tokens_per_second


def _with_played_vendors(configured: Configuration, run: PlannedRun) -> Plan:
    """The run's plan, which by itself names no vendor where there is one mesh."""
    args, plan = configured.args, configured.plan
    played = run.environ[VENDOR_VARIABLE]
    meshes = tuple(
        replace(
            mesh,
            vendor=played if len(plan.meshes) == 1 else mesh.vendor,
            recompute=mesh.recompute or _recompute(args),
            distributed_optimizer=args.use_distributed_optimizer,
        )
        for mesh in plan.meshes
    )
    return replace(plan, meshes=meshes)
