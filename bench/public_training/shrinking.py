"""A public command made small enough for a CPU: sizes, data, folders and processes, nothing else.

Every word that is replaced is listed, so that a reader can judge what was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.public_commands import Command
from hetero.errors import UserError
from megatron.hetero.arguments.data import DEFAULT_TOKENIZER

FP8 = "--fp8-format"
RUN, TEXT = "RUN", "TEXT"
"""Where folders of one run and the shared text stand in the words until a run names them."""

LAYERS, HIDDEN, HEADS, SEQUENCE = 4, 64, 4, 64
EXPERTS, TOP, GROUPS = 8, 2, 4
"""Most experts of a layer, of a token, and groups of experts."""
LATENT = {
    "--q-lora-rank": 32,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
}
FP8_ROTATED = {"--qk-pos-emb-head-dim": 16}
"""In place of that, as sides of a product in fp8 are multiples of 16."""
FFN_MULTIPLE = 16
MICRO_BATCH, MICRO_BATCHES = 2, 4
ITERATIONS, FP16_ITERATIONS = 10, 30
"""fp16 begins with a loss scale of 2^32; its first dozen steps are skipped until it is smaller."""
EVALUATIONS = 2
PARALLEL, PROCESSES = 2, 4
"""Most ranks of one kind of parallelism, and of the mixed run's processes where that allows it."""

TOKENIZER_FILES = {
    "GPT2BPETokenizer": {
        "--vocab-file": f"{TEXT}/gpt2/vocab.json",
        "--merge-file": f"{TEXT}/gpt2/merges.txt",
    },
    "HuggingFaceTokenizer": {"--tokenizer-model": f"{TEXT}/huggingface"},
    "Llama2Tokenizer": {"--tokenizer-model": f"{TEXT}/sentencepiece/tokenizer.model"},
}
"""By the type that a script names; its own files are those of a model and cannot be had."""
TOKENS = "tokens_text_document"

_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_FOLDERS = ("--save", "--load", "--tensorboard-dir", "--data-cache-path")
_CHUNK_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_COUNTED_AS_LAYERS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_SCHEDULE = ("--lr-decay-{}", "--lr-warmup-{}", "--lr-wsd-decay-{}")


@dataclass(frozen=True)
class Replacement:
    """One flag's words as they were written and as they are used; empty where there are none."""

    flag: str
    written: str
    used: str


@dataclass(frozen=True)
class Shrunk:
    """A small command of the same kind, for this many processes with its own flags alone."""

    words: tuple[str, ...]
    replaced: tuple[Replacement, ...]
    tokenizer: str
    tensor: int
    context: int
    pipeline: int
    data: int

    @property
    def processes(self) -> int:
        return self.processes_of(self.pipeline)

    def processes_of(self, stages: int) -> int:
        """With so many pipeline stages and as many replicas."""
        return self.tensor * self.context * stages * self.data

    def flags(self, *, text: Path, run: Path) -> tuple[str, ...]:
        """Its words, for the folder of the text and that of one run."""
        return tuple(_placed(_placed(word, TEXT, text), RUN, run) for word in self.words)


def _placed(word: str, name: str, folder: Path) -> str:
    return str(folder / word.removeprefix(f"{name}/")) if word.startswith(f"{name}/") else word


@dataclass(frozen=True)
class _Option:
    flag: str
    values: tuple[str, ...]


class _Words:
    """What a command line says, by flag; the last of several counts."""

    def __init__(self, words: Sequence[str]) -> None:
        self.options = tuple(_options(words))

    def number(self, flag: str, default: float) -> float:
        return float(self.text(flag) or default)

    def integer(self, flag: str, default: int) -> int:
        return int(self.text(flag) or default)

    def text(self, flag: str) -> str:
        values = [" ".join(option.values) for option in self.options if option.flag == flag]
        return values[-1] if values else ""

    def __contains__(self, flag: str) -> bool:
        return any(option.flag == flag for option in self.options)


def _options(words: Sequence[str]) -> Iterator[_Option]:
    flag, values = "", []
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag:
            yield _Option(flag, tuple(values))
        flag, separator, value = word.partition("=")
        values = [value] if separator else []
    if flag:
        yield _Option(flag, tuple(values))


@dataclass(frozen=True)
class _Shape:
    """Ranks of each kind: as written, and as used."""

    tensor: int
    context: int
    pipeline: int
    data: int
    written_data: int


def shrink(command: Command) -> Shrunk:
    """The command with small sizes. Raises UserError where its tokens are not text's."""
    written = _Words(command.words)
    shape = _shape(written, command.gpus)
    tokenizer = written.text("--tokenizer-type") or DEFAULT_TOKENIZER
    if tokenizer not in TOKENIZER_FILES:
        raise UserError(
            f"{command.name} has --tokenizer-type {tokenizer}; choose one of those with "
            + " or ".join(TOKENIZER_FILES)
        )
    used = {
        **_parallel(shape),
        **_model(written, shape),
        **_experts(written, shape),
        **_amount(written, shape),
        **TOKENIZER_FILES[tokenizer],
        **{flag: f"{RUN}/{flag.removeprefix('--')}" for flag in _FOLDERS},
    }
    replaced: dict[str, Replacement] = {}
    words: list[str] = []
    for option in written.options:
        values = _values(option, used, tokenizer)
        flag = "--data-path" if option.flag == "--mock-data" else option.flag
        words += [flag, *values]
        if (flag, values) != (option.flag, option.values):
            before = option.values if flag == option.flag else (option.flag,)
            replaced[flag] = Replacement(flag, " ".join(before), " ".join(values))
    return Shrunk(
        words=tuple(words),
        replaced=tuple(replaced.values()),
        tokenizer=tokenizer,
        tensor=shape.tensor,
        context=shape.context,
        pipeline=shape.pipeline,
        data=shape.data,
    )


def _values(option: _Option, used: Mapping[str, str], tokenizer: str) -> tuple[str, ...]:
    """What follows the flag in the small command."""
    if option.flag not in (*_DATA, "--mock-data"):
        return (used[option.flag],) if option.flag in used else option.values
    (file, *_) = TOKENIZER_FILES[tokenizer].values()
    prefix = "/".join([*file.split("/")[:2], TOKENS])
    # Weights stay; a list that has lost its only path gets one.
    values = tuple(value if _is_number(value) else prefix for value in option.values)
    return values if prefix in values else (*values, prefix)


def _is_number(value: str) -> bool:
    return value.replace(".", "", 1).isdigit()


def _shape(written: _Words, gpus: int) -> _Shape:
    tensor = written.integer("--tensor-model-parallel-size", 1)
    pipeline = written.integer("--pipeline-model-parallel-size", 1)
    context = written.integer("--context-parallel-size", 1)
    data = gpus // (tensor * context * pipeline)
    used = min(tensor, PARALLEL)
    shared = min(context, PARALLEL)
    return _Shape(
        tensor=used,
        context=shared,
        pipeline=min(pipeline, PARALLEL),
        # The mixed run has two stages, also where the script has one.
        data=max(min(data, PROCESSES // (PARALLEL * used * shared)), 1),
        written_data=data,
    )


def _parallel(shape: _Shape) -> dict[str, str]:
    return {
        "--tensor-model-parallel-size": str(shape.tensor),
        "--context-parallel-size": str(shape.context),
        "--pipeline-model-parallel-size": str(shape.pipeline),
    }


def _model(written: _Words, shape: _Shape) -> dict[str, str]:
    """Sizes of the model in the proportions of its own."""
    layers = max(LAYERS, written.integer(_CHUNK_LAYERS, 0) * 2 * shape.pipeline)
    # The embedding and the loss take a layer's place in the division.
    places = shape.pipeline * written.integer("--num-virtual-stages-per-pipeline-rank", 1)
    layers = max(layers, places)
    layers += -sum(flag in written for flag in _COUNTED_AS_LAYERS) % places
    hidden, heads = written.integer("--hidden-size", 0), written.integer("--num-attention-heads", 0)
    ffn = written.integer("--ffn-hidden-size", 4 * hidden)
    groups = HEADS * written.integer("--num-query-groups", heads) // heads
    return {
        "--num-layers": str(min(layers, written.integer("--num-layers", layers))),
        "--hidden-size": str(HIDDEN),
        "--num-attention-heads": str(HEADS),
        "--num-query-groups": str(max(shape.tensor, PARALLEL, groups)),
        "--ffn-hidden-size": str(FFN_MULTIPLE * round(HIDDEN * ffn / hidden / FFN_MULTIPLE)),
        "--seq-length": str(min(SEQUENCE, written.integer("--seq-length", SEQUENCE))),
    }


def _experts(written: _Words, shape: _Shape) -> dict[str, str]:
    """Experts, and the ranks that share them; widths in the proportions of the model's own."""
    latent = LATENT | (FP8_ROTATED if FP8 in written else {})
    used = {flag: str(width) for flag, width in latent.items()}
    experts = min(written.integer("--num-experts", 1), EXPERTS)
    groups = min(written.integer("--moe-router-num-groups", 1), GROUPS)
    chosen = min(written.integer("--moe-router-group-topk", 1), TOP, groups)
    hidden = written.integer("--hidden-size", 1)
    for flag in ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"):
        width = FFN_MULTIPLE * round(HIDDEN * written.integer(flag, 0) / hidden / FFN_MULTIPLE)
        used[flag] = str(max(width, FFN_MULTIPLE))
    width = min(written.integer("--expert-tensor-parallel-size", shape.tensor), shape.tensor)
    ranks = shape.tensor * shape.context * shape.data // width
    return used | {
        "--num-experts": str(experts),
        "--moe-router-topk": str(max(min(written.integer("--moe-router-topk", TOP), TOP), chosen)),
        "--moe-router-num-groups": str(groups),
        "--moe-router-group-topk": str(chosen),
        "--moe-layer-freq": _pattern(written, shape),
        "--expert-tensor-parallel-size": str(width),
        "--expert-model-parallel-size": str(
            min(written.integer("--expert-model-parallel-size", 1), PARALLEL, ranks)
        ),
    }


def _pattern(written: _Words, shape: _Shape) -> str:
    """Which layers have experts: a dense first layer stays one."""
    pattern = written.text("--moe-layer-freq")
    if "[" not in pattern:
        return pattern
    layers = int(_model(written, shape)["--num-layers"])
    return f"([0]*1+[1]*{layers - 1})" if "[0]" in pattern else f"([1]*{layers})"


def _amount(written: _Words, shape: _Shape) -> dict[str, str]:
    """Batches of a few samples, and a handful of them; schedules shrink in proportion."""
    micro = written.integer("--micro-batch-size", 1)
    whole = written.integer("--global-batch-size", micro * shape.written_data)
    most = max(MICRO_BATCHES, written.integer(_GROUP, 0))
    count = min(most, whole // (micro * shape.written_data))
    batch = min(MICRO_BATCH, micro) * shape.data * count
    finds_scale = "--fp16" in written and "--loss-scale" not in written
    used = {
        "--micro-batch-size": str(min(MICRO_BATCH, micro)),
        "--global-batch-size": str(batch),
        "--eval-iters": str(min(EVALUATIONS, written.integer("--eval-iters", EVALUATIONS))),
    }
    for unit, per_iteration, written_per_iteration in (("iters", 1, 1), ("samples", batch, whole)):
        total = written.number(f"--train-{unit}", 0)
        if not total:
            continue
        written_iterations = int(total // written_per_iteration)
        iterations = FP16_ITERATIONS if finds_scale else min(ITERATIONS, written_iterations)
        amount = per_iteration * iterations
        used[f"--train-{unit}"] = str(amount)
        for name in _SCHEDULE:
            flag = name.format(unit)
            used[flag] = str(round(written.number(flag, 0) * amount / total))
    return used
