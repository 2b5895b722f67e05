"""Time preprocess_data.py beside the `map` of Hugging Face datasets: same text, same tokenizer.

    python bench/time_preprocessing.py --out preprocess.json [--megabytes 50] [--rounds 5]

`datasets`, which nothing else here needs, is installed into a temporary folder first. In each round
both tokenize the text once.

Timed is what a user waits for once the libraries are imported. Of `map` it is the call of `map`
alone: its reading of the JSON into Arrow comes before and is not counted. Of preprocess_data.py it
is everything: reading the JSON, starting the workers, tokenizing, writing and syncing the index.
The time of all cores is taken too: other work on the machine disturbs it less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from hetero.errors import HeteroError
from hetero.text import integer
from hetero.tools import tool_command_line

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8000

CPU = """
import resource
def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
"""

OURS = """
import sys, time, warnings
warnings.simplefilter("ignore")
from megatron.core.datasets.indexed_dataset import DType
from transformers import AutoTokenizer
import megatron.hetero.tokenizer.build
from hetero.tools.preprocess_data import main
kind, model, text, out, processes = sys.argv[1:]
started, cpu_before = time.perf_counter(), cpu()
assert main(["--input", text, "--output-prefix", out, "--overwrite", "--tokenizer-type", kind,
             "--tokenizer-model", model, "--workers", processes, "--log-interval", "1000000"]) == 0
seconds, cpu_seconds = time.perf_counter() - started, cpu() - cpu_before
import os
print("seconds", seconds, cpu_seconds, "tokens", os.path.getsize(out + "_text_document.bin") // 2)
"""

MAP = """
import sys, time
import datasets
kind, model, text, out, processes = sys.argv[1:]
datasets.disable_progress_bars()
data = datasets.load_dataset("json", data_files=text, split="train", cache_dir=out)
if kind == "HuggingFaceTokenizer":
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    def tokenize(batch):
        ids = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)
        return {"input_ids": ids["input_ids"]}
else:
    from sentencepiece import SentencePieceProcessor
    tokenizer = SentencePieceProcessor(model_file=model)
    def tokenize(batch):
        return {"input_ids": tokenizer.encode(batch["text"], num_threads=1)}
started, cpu_before = time.perf_counter(), cpu()
mapped = data.map(tokenize, batched=True, remove_columns=data.column_names,
                  num_proc=int(processes) if int(processes) > 1 else None,
                  load_from_cache_file=False)
seconds, cpu_seconds = time.perf_counter() - started, cpu() - cpu_before
import pyarrow.compute
lengths = pyarrow.compute.list_value_length(mapped.data.column("input_ids"))
print("seconds", seconds, cpu_seconds, "tokens", pyarrow.compute.sum(lengths).as_py())
"""


@dataclass(frozen=True)
class Run:
    """Seconds by the clock and of all cores, and the tokens that came out."""

    wall: float
    cpu: float
    tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the JSON file to write"
    )
    parser.add_argument("--megabytes", type=integer(1), default=50, help="size of the text")
    parser.add_argument("--rounds", type=integer(1), default=5, help="number of rounds")
    parser.add_argument(
        "--processes",
        type=integer(1),
        nargs="+",
        default=[2, 1],
        help="number of worker processes, one table for each",
    )
    args = parser.parse_args(argv)
    return tool_command_line.run(lambda: compare(args))


def compare(args: argparse.Namespace) -> str:
    """Run all rounds, and write and return what they come to."""
    tool_command_line.require_results_file(args.out)
    with tempfile.TemporaryDirectory() as folder:
        return compare_in(Path(folder), args)


def compare_in(work: Path, args: argparse.Namespace) -> str:
    install = [sys.executable, *"-m pip install --quiet --disable-pip-version-check".split()]
    # Captured, because a child that Ctrl-C ends prints a traceback.
    installed = subprocess.run(
        [*install, "--target", str(work / "datasets"), "datasets"],
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode:
        raise HeteroError(f"pip could not install datasets: {installed.stderr.strip()}")
    text, size = write_text(work, args.megabytes)
    tokenizers = train_tokenizers(work)
    results = [
        measure(args.rounds, work, text, kind, model, processes)
        for kind, model in tokenizers.items()
        for processes in args.processes
    ]
    for result in results:
        for name in ("ours", "map"):
            wall = statistics.median(result[f"{name}_wall_s"])
            result[f"{name}_mb_per_s"] = round(size / 1e6 / wall, 2)
    record = {"hardware": hardware(), "text_bytes": size, "versions": versions(work)}
    args.out.write_text(json.dumps(record | {"results": results}, indent=1) + "\n")
    return "\n".join(
        str({n: value for n, value in result.items() if not n.endswith("_s") or "mb" in n})
        for result in results
    )


def write_text(work: Path, megabytes: int) -> tuple[Path, int]:
    """Python's own documentation, over and over, as JSON Lines; bytes of text in it."""
    path, size = work / "text.jsonl", 0
    documents = [topics[name] for name in sorted(topics)]
    with path.open("w") as stream:
        while size < megabytes * 1_000_000:
            for document in documents:
                stream.write(json.dumps({"text": document}) + "\n")
                size += len(document.encode())
    return path, size


def train_tokenizers(work: Path) -> dict[str, str]:
    """Both kinds, trained on the spot; where each lies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    documents = [topics[name] for name in sorted(topics)]
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|endoftext|>")
    fast.save_pretrained(work / "fast")
    (work / "train.txt").write_text("\n\n".join(documents))
    command = [sys.executable, "tools/train_tokenizer.py", "--input", f"{work}/train.txt"]
    sizes = ["--output-prefix", f"{work}/sp", "--vocab-size", str(VOCABULARY)]
    subprocess.run([*command, *sizes], cwd=ROOT, check=True, capture_output=True)
    return {
        "HuggingFaceTokenizer": str(work / "fast"),
        "SentencePieceTokenizer": str(work / "sp.model"),
    }


def measure(
    rounds: int, work: Path, text: Path, kind: str, model: str, processes: int
) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {"ours": [], "map": []}
    for number in range(rounds):
        # Who goes first changes, so that neither always meets the warmer machine.
        for name in ("ours", "map") if number % 2 == 0 else ("map", "ours"):
            runs[name].append(timed(work, name, [kind, model, str(text)], processes))
    tokens = {run.tokens for name in runs for run in runs[name]}
    assert len(tokens) == 1, f"the two did not do the same work: {tokens}"
    pairs = list(zip(runs["map"], runs["ours"], strict=True))
    return {
        "tokenizer": kind,
        "processes": processes,
        "tokens": tokens.pop(),
        "speed_of_ours_over_map": ratios([theirs.wall / ours.wall for theirs, ours in pairs]),
        "cpu_of_map_over_ours": ratios([theirs.cpu / ours.cpu for theirs, ours in pairs]),
        **{f"{name}_wall_s": [round(run.wall, 3) for run in runs[name]] for name in runs},
        **{f"{name}_cpu_s": [round(run.cpu, 3) for run in runs[name]] for name in runs},
    }


def ratios(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def timed(work: Path, name: str, what: list[str], processes: int) -> Run:
    program = CPU + (OURS if name == "ours" else MAP)
    out = str(work / ("index" if name == "ours" else "arrow"))
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT if name == "ours" else work / "datasets"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", program, *what, out, str(processes)],
        env=environment,
        cwd=ROOT if name == "ours" else work,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise HeteroError(f"a round of {name} exited with {ended.returncode}: {ended.stderr}")
    words = ended.stdout.split()
    wall, cpu = map(float, words[words.index("seconds") + 1 :][:2])
    return Run(wall=wall, cpu=cpu, tokens=int(words[-1]))


def hardware() -> str:
    return f"{os.cpu_count()}-core {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end"


def versions(work: Path) -> dict[str, str]:
    program = (
        "import datasets, tokenizers, sentencepiece, transformers, platform; "
        "print(platform.python_version(), datasets.__version__, tokenizers.__version__, "
        "sentencepiece.__version__, transformers.__version__)"
    )
    environment = os.environ | {"PYTHONPATH": str(work / "datasets")}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    names = ("python", "datasets", "tokenizers", "sentencepiece", "transformers")
    return dict(zip(names, ended.stdout.split(), strict=True))


if __name__ == "__main__":
    sys.exit(main())
