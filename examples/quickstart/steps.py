"""The commands of the demo: the ones a user would type, with a model that two cores can train."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hetero.errors import UserError
from hetero.text import counted
from hetero.tools.launching.processes import Step, run_step

ROOT = Path(__file__).resolve().parents[2]

VENDORS = ("amd", "nvidia")
PROCESSES = 4
DATA_PARALLEL = 2
LAYERS = (2, 2)
HIDDEN_SIZE = 128
SEQUENCE_LENGTH = 128
MICRO_BATCH_SIZE = 4
GLOBAL_BATCH_SIZE = 16
VOCABULARY = 1024
TRANSPORT = "cpu-forward"

RUN_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
}
"""One thread each, as the processes share a few cores, and no GPU.

The demo is a CPU run everywhere: four processes rarely find four GPUs, and its numbers are to mean
the same on every machine.
"""

_TOKEN_BYTES = 2
"""tools/preprocess_data.py writes 16-bit tokens for any vocabulary that SentencePiece gives us."""

_MODEL_FLAGS = f"""
--num-layers {sum(LAYERS)} --hidden-size {HIDDEN_SIZE} --num-attention-heads 8
--group-query-attention --num-query-groups 4 --ffn-hidden-size 344
--seq-length {SEQUENCE_LENGTH} --max-position-embeddings {SEQUENCE_LENGTH}
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--micro-batch-size {MICRO_BATCH_SIZE} --global-batch-size {GLOBAL_BATCH_SIZE}
--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--use-distributed-optimizer --seed 1234
--split 100,0,0 --eval-iters 0 --num-workers 0 --log-interval 10
""".split()

_NEW_TOKENS = 48
_SAMPLING = ("--temperature", "0.5", "--top-k", "20", "--seed", "1")
"""A model this small repeats itself where it always takes the likeliest token."""

_HETERO_FLAGS = [
    "--hetero-pipeline",
    *("--hetero-vendors", *VENDORS),
    *("--hetero-pipeline-sizes", "1", "1"),
    *("--hetero-pipeline-layers", *map(str, LAYERS)),
    *("--hetero-transport", TRANSPORT),
]
_HOMOGENEOUS_FLAGS = ["--pipeline-model-parallel-size", "2"]


@dataclass(frozen=True)
class Data:
    """What the preparation leaves: a tokenizer and a tokenized data set."""

    folder: Path

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.model"

    @property
    def prefix(self) -> Path:
        return self.folder / "tokens_text_document"

    @property
    def tokens(self) -> int:
        return self.prefix.with_suffix(".bin").stat().st_size // _TOKEN_BYTES

    @property
    def vocabulary(self) -> int:
        """The tool writes one line for each token beside the model."""
        return len(self.tokenizer.with_suffix(".vocab").read_bytes().splitlines())


@dataclass(frozen=True)
class Run:
    """One training run: its command, and the files that it leaves."""

    name: str
    folder: Path
    step: Step
    shown_environment: tuple[tuple[str, str], ...]
    """The variables that make this run what it is, to be shown with its command."""

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / "run.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def clean_environment(added: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would change the demo."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HETERO_", "TORCHELASTIC_"))
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= RUN_ENVIRONMENT
    # Logs are followed while they grow, and read after a failure.
    environment["PYTHONUNBUFFERED"] = "1"
    if Path("/sys/class/net/lo").exists():
        # A laptop's host name often leads nowhere, and all processes are on this machine.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment | dict(added)


def prepare_data(text: str, folder: Path, announce: Callable[[str], None]) -> Data:
    """Train a tokenizer on the text and tokenize it. UserError when the text is too small."""
    data = Data(folder)
    data.text.write_text(text, encoding="utf-8", newline="")
    announce("training a tokenizer")
    _run_tool(
        "train a tokenizer",
        data.folder / "tokenizer.log",
        "tools/train_tokenizer.py",
        *("--input", str(data.text), "--output-prefix", str(data.tokenizer.with_suffix(""))),
        *("--vocab-size", str(VOCABULARY), "--nearest-size"),
    )
    announce("tokenizing")
    _run_tool(
        "preprocess the text",
        data.folder / "preprocess.log",
        "tools/preprocess_data.py",
        *("--input", str(data.text), "--output-prefix", str(data.folder / "tokens")),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(data.tokenizer)),
        *("--append-eod", "--workers", "2"),
    )
    if data.tokens < SEQUENCE_LENGTH + 1:
        raise UserError(
            f"the text is too small to train on: {counted(data.tokens, 'token')} where one sample "
            f"takes {SEQUENCE_LENGTH + 1}; give at least a page of text"
        )
    return data


def _run_tool(name: str, log: Path, script: str, *flags: str) -> None:
    step = Step(
        name=name,
        command=(sys.executable, str(ROOT / script), *flags),
        log=log,
        directory=ROOT,
        environment=clean_environment({}),
    )
    run_step(step)


def hetero_run(data: Data, folder: Path, iterations: int) -> Run:
    """Two stages, `amd` then `nvidia`: each process plays the vendor that the plan gives it.

    It leaves its weights in `checkpoints`.
    """
    run = _run("hetero", data, folder, iterations, _HETERO_FLAGS, {"HETERO_VENDOR": "plan"})
    # The weights at the end are all that is needed to have it write text.
    saving = ("--save", str(run.checkpoints), "--save-interval", str(iterations))
    command = (*run.step.command, *saving, "--no-save-optim", "--no-save-rng")
    return replace(run, step=replace(run.step, command=command))


def homogeneous_run(data: Data, folder: Path, iterations: int) -> Run:
    """The same job without a word about vendors: megatron-core's own pipeline."""
    return _run("homogeneous", data, folder, iterations, _HOMOGENEOUS_FLAGS, {})


def _run(
    name: str,
    data: Data,
    folder: Path,
    iterations: int,
    flags: list[str],
    environment: Mapping[str, str],
) -> Run:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "hetero.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(PROCESSES)),
        str(ROOT / "pretrain_gpt.py"),
        *_MODEL_FLAGS,
        *("--train-iters", str(iterations)),
        *("--lr-warmup-iters", str(min(10, iterations // 2))),
        *("--tokenizer-type", "SentencePieceTokenizer"),
        *("--tokenizer-model", str(data.tokenizer), "--data-path", str(data.prefix)),
        *("--data-cache-path", str(data.folder / "cache")),
        *("--metrics-file", str(folder / "metrics.jsonl")),
        *("--hetero-report", str(folder / "run.json")),
        *flags,
    ]
    step = Step(
        name=f"train, {name}",
        command=tuple(command),
        log=folder / "train.log",
        directory=ROOT,
        environment=clean_environment(environment),
    )
    shown = {**RUN_ENVIRONMENT, **environment}
    return Run(name=name, folder=folder, step=step, shown_environment=tuple(shown.items()))


def complete_prompt(run: Run, prompt: str) -> str:
    """The prompt and how the model that `run` has trained goes on from it."""
    output = run.folder / "completion.txt"
    step = Step(
        name="complete a prompt",
        command=(
            *(sys.executable, str(ROOT / "tools/generate_text.py")),
            # Joined to its flag, as a text may begin with a dash.
            *("--load", str(run.checkpoints), f"--prompt={prompt}"),
            *("--max-new-tokens", str(_NEW_TOKENS), *_SAMPLING),
        ),
        log=run.folder / "generate.log",
        directory=ROOT,
        environment=clean_environment({"PYTHONIOENCODING": "utf-8"}),
        output=output,
    )
    run_step(step)
    return output.read_bytes().decode("utf-8").removesuffix("\n")
