"""Memory does not grow with the input. It is read from the kernel; no test looks at the clock."""

import random
from pathlib import Path

import pytest
import zstandard

from tests.commands import printed

LARGE = 3_000_000
ALLOWED_GROWTH = 2_000_000
"""Bytes, where there are two texts. One text alone would take all of LARGE, and a length and an
offset for each of their half a million documents more than that."""

PEAK = """
import sys, resource
from hetero.tools.preprocess_data import main
assert main(sys.argv[1:]) == 0
own = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("peak", int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def write_text(path: Path, size: int) -> None:
    """Lines of three numbers, a document each, packed where the name says so."""
    draw = random.Random(1234)
    line = "".join(f"{draw.randrange(1000)} {draw.randrange(1000)} 7\n" for _ in range(20_000))
    text = (line * (size // len(line) + 1))[:size].rpartition("\n")[0].encode()
    # Less than a repetition of the lines, or zstd would pack all of them into one.
    parameters = zstandard.ZstdCompressionParameters(window_log=15)
    pack = zstandard.ZstdCompressor(compression_params=parameters).compress
    path.write_bytes(pack(text) if path.suffix == ".zst" else text)


def peak_bytes(folder: Path, size: int) -> tuple[int, int]:
    """The most that the parent, and the largest of its workers, ever held."""
    texts = [folder / f"{size}.txt", folder / f"{size}.txt.zst"]
    for text in texts:
        write_text(text, size)
    flags = [
        *("--input", *map(str, texts), "--text-documents", "line"),
        *("--output-prefix", f"{folder}/{size}"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--workers", "2"),
        # So small that a save happens in the small run too, and costs the same.
        *("--save-seconds", "0.1", "--log-interval", "1000000000"),
    ]
    parent, worker = printed("-c", PEAK, *flags).split()[-2:]
    return int(parent) * 1024, int(worker) * 1024


@pytest.mark.slow
def test_neither_parent_nor_workers_grow_with_the_input(tmp_path):
    small = peak_bytes(tmp_path, LARGE // 12)
    large = peak_bytes(tmp_path, LARGE)
    growth = [after - before for before, after in zip(small, large, strict=True)]
    assert max(growth) < ALLOWED_GROWTH, f"parent and workers grew by {growth} bytes"
