"""tools/compare_ops.py from the command line, on this machine's device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero.observe.operators.sample import Sample
from hetero.tools.compare_ops import main
from hetero.tools.operators import dump as dumps
from tests.commands import PRESETS

TINY = ["--yaml-cfg", str(PRESETS / "tiny.yaml"), "--padded-vocab-size", "512"]


def _changed(path: Path, name: str, factor: float) -> None:
    """Let a dump say that one tensor was computed otherwise."""
    dump = dumps.read(path)
    sample = dump.samples[name]
    values = (sample.values.float() * factor).to(sample.dtype)
    samples = dump.samples | {name: Sample(values, sample.shape, sample.rms, sample.not_finite)}
    dumps.write(dumps.Dump(dump.header, samples), path)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_check_compares_this_device_with_float64(dtype, capsys) -> None:
    assert main(["check", "--dtype", dtype, *TINY]) == 0
    text = capsys.readouterr().out
    assert "against the float64 reference" in text
    assert text.endswith("All 16 operators agree within rounding, forward and backward.\n")


def test_dumps_travel_between_machines_as_small_files(tmp_path, capsys, refused) -> None:
    """Two runs of one machine stand for two machines here."""
    here, there, exact, other = (str(tmp_path / name) for name in ("here", "there", "exact", "o"))
    assert main(["run", "--out", here, "--sample", "1000", *TINY]) == 0
    assert "16 operators" in capsys.readouterr().out
    header = dumps.read(Path(here)).header
    assert (header.dtype, header.torch) == ("bfloat16", torch.__version__)
    assert header.flags["hidden_size"] == 64
    assert Path(here).stat().st_size < 1_000_000
    assert main(["run", "--out", there, "--sample", "1000", *TINY]) == 0
    assert main(["run", "--out", exact, "--sample", "1000", "--device", "reference", *TINY]) == 0
    assert main(["compare", here, there]) == 0
    assert main(["compare", here, exact]) == 0
    _changed(Path(there), "isolated/layers.0.linear_fc1/output", 1.01)
    assert main(["compare", here, there]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("The first operator that diverges is layers.0.linear_fc1, forward")
    assert "a wrong scale" in last
    dump = dumps.read(Path(here))
    flags = dump.header.flags | {"layernorm_epsilon": 1e-6}
    dumps.write(dumps.Dump(replace(dump.header, flags=flags), dump.samples), Path(other))
    said = refused(main, ["compare", here, other])
    assert "layernorm_epsilon is 1e-05 in one and 1e-06" in said


GPU_SHAPES = {
    "tiny": TINY,
    "llama 8b": [
        *["--yaml-cfg", str(PRESETS / "llama3.1_8b.yaml"), "--seq-length", "1024"],
        *["--padded-vocab-size", "32768"],
    ],
}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT CHECKED: no GPU on this machine")
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_every_operator_of_a_gpu_agrees_with_float64(shape, capsys) -> None:
    code = main(["check", "--device", "cuda", "--dtype", "bf16", *GPU_SHAPES[shape]])
    assert code == 0, capsys.readouterr().out
