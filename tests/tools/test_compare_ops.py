"""tools/compare_ops.py from the command line, on this machine's device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero.observe.operators.sample import Sample
from hetero.tools.compare_ops import main
from hetero.tools.operators import dump as dumps
from megatron.hetero.fp8_scaling import LayerScaling
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


FP8 = ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_products_in_fp8_agree_with_float64_within_the_rounding_of_their_matrices(
    vendor, recipe, capsys, monkeypatch
) -> None:
    """Forward e4m3 alone, backward with e5m2; of one more bit less the error is twice as large."""
    monkeypatch.setenv("HETERO_VENDOR", vendor)
    assert main(["check", *TINY, *FP8, recipe]) == 0
    table = capsys.readouterr().out
    assert table.endswith("All 16 operators agree within rounding, forward and backward.\n")
    (row,) = [line for line in table.splitlines() if line.startswith("layers.0.linear_qkv   ")][:1]
    error, allowed = map(float, row.split()[4:6])
    assert 0.02 < error < allowed / 2 < 0.05


def test_dumps_of_both_vendors_types_of_fp8_agree(tmp_path, monkeypatch) -> None:
    files = {vendor: str(tmp_path / vendor) for vendor in ("nvidia", "amd")}
    for vendor, file in files.items():
        monkeypatch.setenv("HETERO_VENDOR", vendor)
        assert main(["run", "--out", file, *TINY, *FP8, "tensorwise"]) == 0
    types = [dumps.read(Path(file)).header.kernels["fp8"] for file in files.values()]
    assert types == ["e4m3fn and e5m2", "e4m3fnuz and e5m2fnuz"]
    assert main(["compare", *files.values()]) == 0
    _changed(Path(files["amd"]), "isolated/layers.0.linear_fc1/output", 1.1)
    assert main(["compare", *files.values()]) == 1
    bf16 = str(tmp_path / "bf16")
    assert main(["run", "--out", bf16, *TINY, "--bf16"]) == 0
    assert main(["compare", files["nvidia"], bf16]) == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_wrong_factor_of_fp8_matrices_is_found(recipe, capsys, monkeypatch) -> None:
    compute = LayerScaling.multiply

    def scaled(*args, **kwargs):
        return 1.05 * compute(*args, **kwargs)

    monkeypatch.setattr(LayerScaling, "multiply", scaled)
    assert main(["check", *TINY, *FP8, recipe]) == 1
    assert "layers.0.linear_qkv, forward (output): it is 1.0" in capsys.readouterr().out


def test_fp8_is_of_matrices_in_bf16(refused) -> None:
    words = ["check", "--dtype", "fp16", *TINY, *FP8, "tensorwise"]
    assert "give --dtype bf16" in refused(main, words)


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
