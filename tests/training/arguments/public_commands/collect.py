"""Make commands.json from snapshots of the repositories that `sources.py` names.

python -m tests.training.arguments.public_commands.collect SNAPSHOTS MEGATRON_CHECKOUT WORK

SNAPSHOTS holds one git directory per repository, OWNER+NAME/repo. MEGATRON_CHECKOUT is Megatron-LM
core_v0.16.1, whose own parser says which commands it accepts. WORK keeps what was run, so
that an interrupted collection goes on where it was. See README.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.training.arguments.public_commands.capture import capture
from tests.training.arguments.public_commands.classify import (
    DENSE,
    features_of,
    kind_of,
    without_places,
)
from tests.training.arguments.public_commands.functional_tests import functional_tests
from tests.training.arguments.public_commands.primus import commands_of_primus
from tests.training.arguments.public_commands.sources import (
    MEGATRON,
    MEGATRON_RELEASES,
    PRIMUS,
    PRIMUS_RELEASES,
    SCRIPTS,
    Scripts,
    Variant,
)

HERE = Path(__file__).resolve().parent
DATA = HERE / "commands.json"
RUN_TRAINING = "tests/functional_tests/shell_test_utils/_run_training.sh"


@dataclass(frozen=True)
class Found:
    """A command, where it came from, and what is known of it."""

    repository: str
    revision: str
    path: str
    variant: str
    program: str
    gpus: int
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


class Snapshots:
    """Working trees of revisions, unpacked when first asked for."""

    def __init__(self, folder: Path, trees: Path) -> None:
        self._folder, self._trees = folder, trees

    def tree(self, repository: str, revision: str) -> tuple[Path, str]:
        """The unpacked files, and the short name of the commit."""
        git = ["git", "--git-dir", str(self._folder / repository.replace("/", "+") / "repo")]
        commit = subprocess.check_output(
            [*git, "rev-parse", "--short=12", f"{revision}^{{commit}}"]
        )
        place = self._trees / repository.replace("/", "+") / commit.decode().strip()
        if not place.is_dir():
            place.mkdir(parents=True)
            with subprocess.Popen([*git, "archive", revision], stdout=subprocess.PIPE) as packed:
                # A large file that the snapshot lacks ends the archive; what came is enough.
                subprocess.run(
                    ["tar", "-x", "-C", str(place)],
                    stdin=packed.stdout,
                    check=False,
                    stderr=subprocess.DEVNULL,
                )
        return place, commit.decode().strip()


def from_script(snapshots: Snapshots, scripts: Scripts) -> Iterator[tuple[Any, ...]]:
    tree, commit = snapshots.tree(scripts.snapshot or scripts.repository, scripts.revision)
    revision = commit if scripts.revision == "HEAD" else scripts.revision
    for file in sorted(tree.rglob("*")):
        path = str(file.relative_to(tree))
        if file.is_file() and not file.is_symlink() and re.fullmatch(scripts.paths, path):
            for variant in scripts.variants:
                yield scripts, revision, tree, path, variant


def remembered(run: Callable[[Any], list[Found]], job: Any, *, folder: Path) -> list[Found]:
    """`run(job)`, or what it gave when an earlier, interrupted collection ran it."""
    file = folder / (hashlib.sha256(repr(job).encode()).hexdigest()[:32] + ".json")
    if not file.is_file():
        text = json.dumps([asdict(one) for one in run(job)])
        file.write_text(text)
    return [Found(**{**one, "words": tuple(one["words"])}) for one in json.loads(file.read_text())]


def run_script(job: tuple[Scripts, str, Path, str, Variant]) -> list[Found]:
    scripts, revision, tree, path, variant = job
    environment = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "6000",
        "NNODES": "1",
        "NODE_RANK": "0",
        "RANK": "0",
        "GPUS_PER_NODE": "8",
        "WANDB_API_KEY": "",
        **variant.environment,
    }
    captured, printed = capture(tree, path, arguments=variant.arguments, environment=environment)
    if not captured:
        captured, printed = capture(
            tree,
            path,
            arguments=variant.arguments,
            environment=environment,
            start=str(Path(path).parent),
        )
    if not captured:
        print(f"nothing: {scripts.repository} {path}: {printed.strip()[-200:]!r}", file=sys.stderr)
    return [
        Found(
            scripts.repository,
            revision,
            path,
            variant.name + (f" ({number + 1})" if number else ""),
            Path(one.program).name,
            scripts.gpus or one.world_size,
            one.words,
            dict(one.environment),
        )
        for number, one in enumerate(captured)
    ]


def run_test_case(job: tuple[str, Path, str, int, dict[str, Any]]) -> list[Found]:
    revision, tree, path, gpus, config = job
    environment = {
        "TRAINING_SCRIPT_PATH": "pretrain_gpt.py",
        "TRAINING_PARAMS_PATH": "/stubs/model_config.json",
        "OUTPUT_PATH": "/output",
        "TENSORBOARD_PATH": "/output/tensorboard",
        "CHECKPOINT_SAVE_PATH": "/checkpoints",
        "CHECKPOINT_LOAD_PATH": "/checkpoints",
        "DATA_PATH": "/data",
        "DATA_CACHE_PATH": "/cache",
        "RUN_NUMBER": "1",
        "REPEAT": "1",
        "IS_NEMO_TEST": "false",
        "RECORD_CHECKPOINTS": "false",
        "GPUS_PER_NODE": "8",
        "NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_JOB_START_TIME": "0",
        "SLURM_JOB_END_TIME": "7200",
        # bash would leave the value of a flag out where one of these is unknown.
        "PATH": "/stubs:/usr/local/bin:/usr/bin:/bin",
    }
    captured, printed = capture(
        tree,
        RUN_TRAINING,
        environment=environment,
        files={"model_config.json": json.dumps(config)},
        time_limit=40,
    )
    if not captured:
        print(f"nothing: {path}: {printed.strip()[-300:]!r}", file=sys.stderr)
    return [
        Found(
            MEGATRON, revision, path, "", "pretrain_gpt.py", gpus, one.words, dict(one.environment)
        )
        for one in captured
    ]


def judged(found: list[Found], megatron: Path) -> list[dict[str, Any]]:
    """The entries of commands.json."""
    given = json.dumps(
        [{"words": one.words, "gpus": one.gpus, "environment": one.environment} for one in found]
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "megatron_verdict.py")],
        input=given,
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(megatron)},
    )
    entries = []
    for one, complaint in zip(found, json.loads(done.stdout), strict=True):
        entry = asdict(one)
        del entry["environment"], entry["program"]
        entry["kind"] = kind_of(one.program, one.words)
        entry["features"] = features_of(one.words)
        entry["megatron"] = (complaint or "accepted")[:300]
        entry["words"] = shlex.join(one.words)
        entries.append(entry)
    return entries


def distinct(found: Iterable[Found]) -> list[Found]:
    """Of commands that a repository repeats word for word, the one of the newest revision."""
    kept: dict[tuple[Any, ...], Found] = {}
    for one in found:
        one = replace(one, words=tuple(without_places(one.words)))
        kept[one.repository, one.gpus, one.words] = one
    return list(kept.values())


def main(argv: list[str]) -> int:
    snapshot_folder, megatron = Path(argv[0]), Path(argv[1])
    work = Path(argv[2])
    (work / "found").mkdir(parents=True, exist_ok=True)
    script = functools.partial(remembered, run_script, folder=work / "found")
    test = functools.partial(remembered, run_test_case, folder=work / "found")
    with ThreadPoolExecutor(3) as pool:
        snapshots = Snapshots(snapshot_folder, work / "trees")
        jobs = [job for scripts in SCRIPTS for job in from_script(snapshots, scripts)]
        found = [one for group in pool.map(script, jobs) for one in group]
        cases = [
            (release, tree, *case)
            for release in MEGATRON_RELEASES
            for tree in [snapshots.tree(MEGATRON, release)[0]]
            for case in functional_tests(tree)
        ]
        # The same configuration stands in several releases.
        unique = {
            json.dumps([gpus, config]): (release, tree, path, gpus, config)
            for release, tree, path, gpus, config in cases
        }
        found += [one for group in pool.map(test, unique.values()) for one in group]
        for release in PRIMUS_RELEASES:
            tree, _ = snapshots.tree(PRIMUS, release)
            for path, words, gpus in commands_of_primus(tree, megatron):
                found.append(
                    Found(PRIMUS, release, path, "", "pretrain_gpt.py", gpus, tuple(words))
                )
        entries = judged(distinct(found), megatron)
    lines = [
        json.dumps(entry, ensure_ascii=False)
        for entry in sorted(
            entries, key=lambda e: (e["repository"], e["path"], e["revision"], e["variant"])
        )
    ]
    DATA.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    counted = sum(e["kind"] == DENSE and e["megatron"] == "accepted" for e in entries)
    print(f"{len(entries)} commands, {counted} dense and accepted by Megatron-LM")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
