"""What searching a plan takes, and how a general optimiser does on the same problem.

    python bench/search_plans.py growth --out growth.json
    python bench/search_plans.py beside --out beside.json   # needs scipy, which we do not

    python bench/search_plans.py sum --out sum.json
    python bench/search_plans.py estimate --out estimate.json

`sum` plans for all nodes of a cluster file and for each kind of them alone. `growth` and `beside`
make their clusters of built-in accelerators in equal parts; costs follow from published figures.
`estimate` compares the estimate that ranks plans with the simulation, over random pipelines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import numpy as np

from hetero import text
from hetero.errors import UserError
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import Cluster, cluster_from_mapping, load_cluster
from hetero.planner.layer_split import estimate
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.pipeline_simulator import EdgeTimes, PipelineTimes, simulate_pipeline
from hetero.planner.prediction import estimate_pipeline
from hetero.planner.search import search
from hetero.planner.search_space import (
    MeshCandidate,
    Problem,
    SearchSpace,
    context_sizes,
    mesh_candidates,
    mesh_shapes,
    pipeline_model,
)
from hetero.planner.solution import find_best_plans
from hetero.tools import tool_command_line
from hetero.tools.planning.solution_table import one_line

KINDS = ("H100-SXM", "MI300X", "A100-SXM4-80GB", "MI250X", "A100-SXM4-40GB", "MI210")
_NOWHERE = 1e6


def model(layers: int, seq_length: int = 4096) -> ModelShape:
    """A GPT of 100 billion parameters at 96 layers."""
    return ModelShape(
        layers=layers,
        hidden=9216,
        ffn=36864,
        heads=72,
        query_groups=72,
        head_size=128,
        vocabulary=128256,
        seq_length=seq_length,
        gated=False,
        tied=False,
    )


def cluster(gpus: int, kinds: int) -> Cluster:
    """Nodes of 8 in equal parts, the first kinds taking what is left over."""
    nodes = [gpus // 8 // kinds + (place < gpus // 8 % kinds) for place in range(kinds)]
    entries = [
        {"accelerator": name, "nodes": count} for name, count in zip(KINDS, nodes, strict=False)
    ]
    return cluster_from_mapping({"nodes": entries}, source="the benchmark")


def problem(gpus: int, kinds: int, layers: int, batch: int, seq_length: int = 4096) -> Problem:
    shape, nodes = model(layers, seq_length), cluster(gpus, kinds)
    space = SearchSpace(global_batch=batch, context=context_sizes(seq_length, 8))
    return Problem(nodes, shape, analytic_profile(shape, nodes), space)


def growth(seq_length: int) -> list[dict[str, float]]:
    """Seconds over accelerators, over layers and over kinds."""
    cases = [(gpus, 4, 96) for gpus in (64, 128, 256, 512, 1024, 4096, 16384)]
    cases += [(1024, 4, layers) for layers in (24, 48, 192)]
    cases += [(1024, kinds, 96) for kinds in (1, 2, 3, 5, 6)] + [(16384, 6, 96)]
    rows = []
    for gpus, kinds, layers in cases:
        asked = problem(gpus, kinds, layers, max(512, gpus), seq_length)
        begin, used = time.monotonic(), time.process_time()
        found = search(asked)
        rows.append(
            {
                "accelerators": gpus,
                "kinds": kinds,
                "layers": layers,
                "seconds": round(time.monotonic() - begin, 3),
                "cpu_seconds": round(time.process_time() - used, 3),
                "combinations": float(found.combinations),
                "exact": found.is_exact,
                "step_seconds": round(found.candidates[0].seconds, 4) if found.candidates else 0,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
        print(rows[-1], flush=True)
    return rows


def draw(rows: Sequence[dict[str, float]], path: Path) -> None:
    """CPU seconds over accelerators, layers and kinds, the other two as in the middle."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from hetero.tools.reports.charts import LIGHT, style_axes

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor(LIGHT.paper)
    middle = {"accelerators": 1024, "kinds": 4, "layers": 96}
    for axes, name in zip(figure.subplots(1, 3), middle, strict=True):
        fixed = {other: value for other, value in middle.items() if other != name}
        line = sorted(
            (row[name], row["cpu_seconds"])
            for row in rows
            if all(row[other] == value for other, value in fixed.items())
        )
        axes.plot(*zip(*line, strict=True), marker="o", color="#b3402a")
        others = ", ".join(f"{value:,} {other}" for other, value in fixed.items())
        style_axes(axes, LIGHT, x_label=f"{name} ({others})")
        axes.set_ylabel("seconds of one core")
        axes.set_ylim(bottom=0)
        if name == "accelerators":
            axes.set_xscale("log", base=2)
    figure.savefig(path, format="png", dpi=110)


class General:
    """A plan as numbers from 0 to 1, which a general optimiser changes as it likes.

    One for the sequences at once; for each kind its shape among those that take as many, its
    stages, its place in the order and its part of the layers.
    """

    def __init__(self, asked: Problem) -> None:
        self.asked, self.calls = asked, 0
        batch = asked.space.global_batch
        self.steps = [step for step in range(1, batch + 1) if batch % step == 0]
        self.choices: dict[int, list[list[list[MeshCandidate]]]] = {}

    @property
    def dimensions(self) -> int:
        return 1 + 4 * len(self.asked.cluster.kinds)

    def seconds(self, x: Sequence[float]) -> float:
        self.calls += 1
        asked = self.asked
        step = self.steps[min(int(x[0] * len(self.steps)), len(self.steps) - 1)]
        if step not in self.choices:
            self.choices[step] = [
                [mesh_candidates(asked, option, 1) for option in mesh_shapes(asked, kind, step)]
                for kind in asked.cluster.kinds
            ]
        meshes, weights = [], []
        parts = np.reshape(x[1:], (-1, 4))
        for number in np.argsort(parts[:, 2]):
            shape, stages, _, weight = parts[number]
            options = self.choices[step][number]
            place = int(shape * (len(options) + 1))  # one more: the kind takes no part
            if place < len(options) and options[place]:
                choices = options[place]
                meshes.append(choices[min(int(stages * len(choices)), len(choices) - 1)])
                weights += [weight + 1e-3] * meshes[-1].stages
        if not meshes or len(weights) > asked.model.layers:
            return _NOWHERE
        layers = self._rounded(np.array(weights))
        pipeline = pipeline_model(asked, meshes, micro_batches=asked.space.global_batch // step)
        over = int(np.maximum(layers - pipeline.max_layers, 0).sum())
        return _NOWHERE / 10 * over if over else estimate(pipeline, layers).seconds

    def _rounded(self, weights: np.ndarray) -> np.ndarray:
        total = self.asked.model.layers
        exact = np.maximum(total * weights / weights.sum(), 1.0)
        layers = np.floor(exact).astype(np.int64)
        for place in np.argsort(layers - exact)[: max(total - int(layers.sum()), 0)]:
            layers[place] += 1
        while layers.sum() > total:
            layers[int(np.argmax(layers))] -= 1
        while layers.sum() < total:
            layers[int(np.argmin(layers))] += 1
        return layers


def beside(gpus: int, kinds: int, layers: int, batch: int, seconds: float) -> dict[str, float]:
    """Differential evolution of scipy for so long, and then our search."""
    from scipy.optimize import differential_evolution

    asked = problem(gpus, kinds, layers, batch)
    general = General(asked)
    until = time.monotonic() + seconds
    found = differential_evolution(
        general.seconds,
        [(0.0, 1.0)] * general.dimensions,
        popsize=20,
        maxiter=10**9,
        tol=0,
        seed=1,
        polish=False,
        callback=lambda *_: time.monotonic() > until,
    )
    begin = time.monotonic()
    ours = search(replace(asked, space=SearchSpace(global_batch=batch, replicas=False)))
    return {
        "accelerators": gpus,
        "kinds": kinds,
        "layers": layers,
        "global_batch": batch,
        "scipy_seconds": seconds,
        "scipy_plans": general.calls,
        "scipy_step_seconds": round(float(found.fun), 5),
        "search_seconds": round(time.monotonic() - begin, 2),
        "step_seconds": round(ours.candidates[0].seconds, 5),
        "exact": ours.is_exact,
        "over_scipy": round(ours.candidates[0].seconds / float(found.fun) - 1, 5),
    }


@dataclass(frozen=True)
class RandomPipelines:
    """Of 2 to 8 stages, whose backward passes take twice as long as the forward ones."""

    apart: float
    """The slowest stage may take so many times as long as the fastest."""
    wires: float
    """A transfer takes up to this part of a stage's forward pass of 1."""
    chunks: int
    rounds: tuple[int, int]
    """The fewest and the most micro-batches, over the stages."""

    def draw(self, rng: np.random.Generator) -> PipelineTimes:
        stages, chunks = int(rng.integers(2, 9)), self.chunks
        passes = np.exp(rng.uniform(0.0, np.log(self.apart), stages)) / chunks
        wires = rng.uniform(0.0, self.wires, stages if chunks > 1 else stages - 1) / chunks
        return PipelineTimes(
            tuple((float(one),) * chunks for one in passes),
            tuple((2 * float(one),) * chunks for one in passes),
            tuple(EdgeTimes(float(one), 0.0) for one in wires),
            stages * int(rng.integers(self.rounds[0], self.rounds[1] + 1)),
        )


def near_simulation(count: int) -> list[dict[str, Any]]:
    """How far the estimate is from the simulation, over so many pipelines a row."""
    kinds = [
        RandomPipelines(apart, wires, 1, (1, 8))
        for apart, wires in ((1.5, 0.06), (3, 0.2), (20, 5))
    ]
    kinds += [RandomPipelines(3, 0.2, 2, rounds) for rounds in ((4, 8), (1, 3))]
    rows = []
    for kind in kinds:
        rng = np.random.default_rng(1)
        drawn = [kind.draw(rng) for _ in range(count)]
        errors = [abs(estimate_pipeline(one) / simulate_pipeline(one).seconds - 1) for one in drawn]
        rows.append({**asdict(kind), "mean": float(np.mean(errors)), "largest": max(errors)})
        print(rows[-1], flush=True)
    return rows


def beside_sum(folder: Path) -> list[dict[str, Any]]:
    """Tokens a second of four kinds together beside those of each alone, added up."""
    shape = load_model(str(folder / "four_kinds_model.yaml"))
    cluster_file = load_cluster(folder / "four_kinds_cluster.yaml")

    def best(nodes: Cluster, batch: int) -> dict[str, Any]:
        space = SearchSpace(global_batch=batch, sequence_parallel=True)
        found = find_best_plans(Problem(nodes, shape, analytic_profile(shape, nodes), space))
        if found is None:
            return {"tokens_per_second": 0.0, "plan": "does not fit in memory"}
        tokens = found.first.prediction.tokens_per_second
        return {"tokens_per_second": round(tokens), "plan": one_line(found.first)}

    rows = []
    for least_memory, batch, batch_alone in ((0, 2048, 512), (0, 2048, 2048), (64, 2048, 512)):
        kinds = [
            replace(
                kind,
                accelerator=replace(
                    kind.accelerator, memory_gib=max(kind.accelerator.memory_gib, least_memory)
                ),
            )
            for kind in cluster_file.kinds
        ]
        together = best(Cluster(tuple(kinds), {}), batch)
        alone = {kind.name: best(Cluster((kind,), {}), batch_alone) for kind in kinds}
        total = sum(one["tokens_per_second"] for one in alone.values())
        rows.append(
            {
                "least_gib": least_memory,
                "global_batch": batch,
                "global_batch_alone": batch_alone,
                "together": together,
                "alone": alone,
                "of_the_sum": round(together["tokens_per_second"] / total, 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    grows = commands.add_parser("growth", description="How long the search takes.")
    grows.add_argument(
        "--seq-length",
        type=text.integer(1),
        default=4096,
        help="tokens of a sample; ranks may share those of 16384 or more; default: 4096",
    )
    grows.add_argument("--out", type=Path, required=True, help="JSON; a PNG is put beside it")
    besides = commands.add_parser("beside", description="The search beside scipy's.")
    besides.add_argument("--out", type=Path, required=True, help="JSON; a row is added to it")
    besides.add_argument(
        "--seconds",
        type=text.number(above=0),
        default=600,
        help="seconds that the optimiser may take",
    )
    besides.add_argument("--gpus", type=text.integer(8), default=128, help="number of GPUs")
    kinds = range(1, len(KINDS) + 1)
    besides.add_argument(
        "--kinds", type=int, choices=kinds, default=3, help="number of kinds of GPUs"
    )
    for size, default, what in (
        ("layers", 48, "layers of the model"),
        ("batch", 256, "sequences of a global batch"),
    ):
        besides.add_argument(f"--{size}", type=text.integer(1), default=default, help=what)
    adds = commands.add_parser("sum", description="Kinds together and alone.")
    adds.add_argument("--out", type=Path, required=True, help="JSON")
    estimates = commands.add_parser("estimate", description="The estimate and the simulation.")
    estimates.add_argument("--out", type=Path, required=True, help="JSON")
    estimates.add_argument(
        "--pipelines", type=text.integer(1), default=1500, help="number of pipelines a row"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    return tool_command_line.run(lambda: measure(options))


def measure(options: argparse.Namespace) -> str:
    """Search, print the rows and write them."""
    tool_command_line.require_results_file(options.out)
    rows: list[Any]
    if options.command == "sum":
        rows = beside_sum(Path(__file__).resolve().parent)
    elif options.command == "estimate":
        rows = near_simulation(options.pipelines)
    elif options.command == "beside":
        if importlib.util.find_spec("scipy") is None:
            raise UserError("scipy is not installed; install it, or put it on PYTHONPATH")
        rows = earlier_rows(options.out)
        rows.append(
            beside(options.gpus, options.kinds, options.layers, options.batch, options.seconds)
        )
        print(rows[-1])
    else:
        rows = growth(options.seq_length)
        draw(rows, options.out.with_suffix(".png"))
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return ""


def earlier_rows(path: Path) -> list[Any]:
    """Those that the file has; none where there is no file."""
    try:
        return list(json.loads(path.read_text())) if path.exists() else []
    except (ValueError, TypeError) as error:
        raise UserError(f"--out {path} is no list of rows ({error}); name another") from error


if __name__ == "__main__":
    sys.exit(main())
