"""What a layer costs, measured on this machine and written for the planner."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import get_attr_wrapped_model

from hetero.data.layer_times import HostClock
from hetero.errors import UserError
from hetero.planner.accelerators import built_in_accelerators
from hetero.planner.analytic_profile import AnalyticProfile
from hetero.planner.layer_profile import (
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
    load_profile,
)
from hetero.planner.model_shape import load_model, model_shape
from hetero.planner.mtp_costs import costs_of_mtp_memory
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions
from hetero.tools.layer_profile.measured_stage import (
    FIRST,
    LAST,
    MIDDLE,
    MeasuredStage,
    StageMemory,
    measured_stage,
)
from hetero.tools.layer_profile.swept_points import layers_of_deep_stages
from hetero.tools.operators.layer_flags import model_arguments
from hetero.tools.profile_layers import main
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.multi_token_prediction import Ahead, shift_batch
from tests.tools.refusals import Refused

LLAMA = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--padded-vocab-size 64 --threads 1 --seconds-a-point 0.01"
).split()


def profile_in_two_rounds(*words: str) -> None:
    """Instead of five, which only make medians steadier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.tools.layer_profile.swept_points._ROUNDS", 2)
        assert main([*words, *LLAMA]) == 0


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MeasuredProfile]:
    out = tmp_path_factory.mktemp("profile") / "here.json"
    profile_in_two_rounds("--out", str(out), "--accelerator", "one", "--sequence", "16", "64")
    return out, load_profile(out)


def test_every_part_has_its_cost(measured: tuple[Path, MeasuredProfile]) -> None:
    costs = measured[1].costs("one", Point(1, 1, 64, "none"))
    assert costs.layer.forward > 0
    assert costs.layer.backward > 0
    # Its time is a difference, which on so small a model is lost in that of the layer.
    assert costs.head_activation_bytes > 0
    assert measured[1].optimizer_seconds("one", 1e6) > measured[1].reduction_seconds("one", 1e6) > 0


@pytest.mark.parametrize(
    ("layers", "width", "deep"), [(2, 256, 3), (6, 256, 6), (40, 256, 8), (40, 4096, 3)]
)
def test_stages_are_deep_where_layers_are_small(layers: int, width: int, deep: int) -> None:
    """Else a cache would hold all of a stage's weights, and not those of a run's."""
    sizes = f"--num-layers {layers} --hidden-size {width} --ffn-hidden-size {4 * width}"
    args = model_arguments([*LLAMA[:-4], *sizes.split()])
    assert layers_of_deep_stages(args) == deep


class DriftingStage:
    """A stage of a machine that gets slower all the time, and stumbles in one pass of many."""

    passes = 0

    def __init__(self, stage: int, layers: int) -> None:
        self.seconds = 0.01 * layers + {FIRST: 0.001, MIDDLE: 0.0, LAST: 0.005}[stage]

    def memory(self, **_: int) -> StageMemory:
        return StageMemory(0, 0)

    def times(self, **_: float) -> PassTimes:
        DriftingStage.passes += 1
        stumble = 3.0 if DriftingStage.passes == 6 else 1.0
        seconds = self.seconds * stumble * 1.001**DriftingStage.passes
        return PassTimes(seconds, 2 * seconds)


def test_a_machine_whose_speed_drifts_is_told_and_hardly_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def built(*_: object, stage: int, layers: int, **__: object) -> Iterator[DriftingStage]:
        yield DriftingStage(stage, layers)

    monkeypatch.setattr("hetero.tools.layer_profile.swept_points.measured_stage", built)
    monkeypatch.setattr(DriftingStage, "passes", 0)
    out = tmp_path / "here.json"
    assert main(["--out", str(out), "--accelerator", "one", "--recompute", "none", *LLAMA]) == 0
    costs = load_profile(out).costs("one", Point(1, 1, 32))
    assert costs.layer.forward == pytest.approx(0.01, rel=0.03)
    assert costs.layer.backward == pytest.approx(0.02, rel=0.03)
    assert costs.head.forward == pytest.approx(0.005, rel=0.1)
    assert costs.embedding.forward == pytest.approx(0.001, rel=0.2)
    assert "the machine is not quiet" in capsys.readouterr().out


class ScriptedClock(HostClock):
    """Each forward pass takes 1 s, and the backward passes 1, 1 and 4 s."""

    def __init__(self) -> None:
        self._marks = iter([0, 1, 2, 2, 3, 4, 4, 5, 9])

    def mark(self) -> int:
        return next(self._marks)


def test_a_pass_takes_the_mean_as_the_passes_of_a_step_do(monkeypatch: pytest.MonkeyPatch) -> None:
    args = model_arguments(LLAMA[:-4])
    clock = ScriptedClock()
    with (
        cpu_shim(),
        measured_stage(
            args, stage=MIDDLE, layers=1, vendor="nvidia", device=torch.device("cpu")
        ) as stage,
    ):
        monkeypatch.setattr("hetero.tools.layer_profile.measured_stage.clock_of", lambda _: clock)
        times = stage.times(micro_batch=1, seq_length=8, seconds=0)
    assert times == PassTimes(1.0, 2.0)


def test_the_data_of_a_run_does_not_matter_and_its_vocabulary_does() -> None:
    """A file of a run's flags is taken as it is; the tokenizer that it names is not read."""
    words = [*LLAMA[:-6], "--data-path", "text", "--tokenizer-type", "SentencePieceTokenizer"]
    words += ["--tokenizer-model", "tok.model"]
    assert model_arguments([*words, "--padded-vocab-size", "64"]).padded_vocab_size == 64
    assert model_arguments([*words, "--vocab-size", "300"]).padded_vocab_size == 384
    with pytest.raises(UserError, match="do not say --padded-vocab-size"):
        model_arguments(words)


@pytest.mark.parametrize("bias", ["add-bias-linear: true", "disable-bias-linear: true"])
def test_a_profile_is_of_the_model_that_the_planner_reads_from_the_same_file(
    tmp_path: Path, bias: str
) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(
        "num-layers: 3\nhidden-size: 64\nnum-attention-heads: 4\nseq-length: 32\n"
        f"max-position-embeddings: 32\nvocab-size: 300\n{bias}\n"
    )
    assert model_shape(model_arguments(["--yaml-cfg", str(file)])) == load_model(str(file))


def test_recomputing_keeps_a_layers_input_alone_and_lengths_in_between_are_known(
    measured: tuple[Path, MeasuredProfile],
) -> None:
    def activations(length: int, recompute: str = "none") -> float:
        costs = measured[1].costs("one", Point(1, 1, length, recompute))
        return costs.layer_activation_bytes

    assert activations(64, "full") == 64 * 32 * 4
    assert activations(64) > 4 * activations(64, "full")
    assert activations(16) < activations(40) < activations(64)


def test_a_second_accelerator_joins_the_file(
    tmp_path: Path, measured: tuple[Path, MeasuredProfile]
) -> None:
    out = tmp_path / "both.json"
    out.write_bytes(measured[0].read_bytes())
    shard = ["--accelerator", "MI300X", "--tensor", "2", "--recompute", "none"]
    profile_in_two_rounds("--out", str(out), *shard)
    both = load_profile(out)
    assert set(both.accelerators) == {"one", "MI300X"}
    half = both.costs("MI300X", Point(2, 1, 32)).layer_activation_bytes
    whole = both.costs("one", Point(1, 1, 32)).layer_activation_bytes
    assert half < whole


def test_another_model_s_profile_stays_as_it_was(
    measured: tuple[Path, MeasuredProfile], refused: Refused
) -> None:
    out, _ = measured
    before = out.read_bytes()
    words = ["--out", out, "--accelerator", "one", *LLAMA, "--num-query-groups", "1"]
    assert "is the profile of another model or dtype" in refused(main, words)
    assert out.read_bytes() == before


def test_a_profile_serves_a_model_with_mtp_layers_and_is_measured_without(
    tmp_path: Path, measured: tuple[Path, MeasuredProfile]
) -> None:
    out = tmp_path / "both.json"
    out.write_bytes(measured[0].read_bytes())
    words = ["--out", str(out), "--accelerator", "two", "--recompute", "none"]
    profile_in_two_rounds(*words, "--mtp-num-layers", "2")
    both = load_profile(out)
    without, beside = (both.costs(name, Point(1, 1, 32)) for name in ("one", "two"))
    assert beside.head_activation_bytes == without.head_activation_bytes


def forward_with_mtp_layers(stage: MeasuredStage, inputs: dict[str, Any]) -> torch.Tensor:
    """As a step's, where `MeasuredStage` leaves MTP layers out."""
    labels = inputs["labels"]
    batch = {"tokens": labels, "labels": labels, "loss_mask": torch.ones_like(labels)}
    ahead = Ahead.of(shift_batch(batch, stage.args.mtp_num_layers or 0), weight=1.0)
    chunk = stage.model.chunks[0]
    take = get_attr_wrapped_model(chunk, "set_input_tensor")
    take([inputs["hidden"].detach().requires_grad_()])
    more = {} if ahead is None else {"ahead": ahead}
    output: torch.Tensor = chunk(None, None, None, labels=labels, **more)
    return output.float().sum()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_mtp_layers_keep_what_follows_from_a_layer_and_the_head(
    recompute: str, mtp_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a last stage, with the float32 logits of all losses. Norms of a CPU keep somewhat more
    than is counted, and a recomputed layer's last norm less."""
    sizes = "--hidden-size 128 --ffn-hidden-size 352 --padded-vocab-size 4096 --bf16"
    args = model_arguments([*LLAMA[:-4], *sizes.split()])
    full = ("full", "uniform", 1) if recompute == "full" else (None, None, None)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    vars(args).update(zip(names, full, strict=True))

    def memory(which: int, layers: int, predicting: int | None = None) -> StageMemory:
        own = argparse.Namespace(**vars(args) | {"mtp_num_layers": predicting})
        device = torch.device("cpu")
        with measured_stage(own, stage=which, layers=layers, vendor="amd", device=device) as stage:
            return stage.memory(micro_batch=8, seq_length=64)

    with cpu_shim():
        shallow, deep = (memory(MIDDLE, layers) for layers in (1, 3))
        monkeypatch.setattr(MeasuredStage, "_forward", forward_with_mtp_layers)
        without, found = memory(LAST, 1), memory(LAST, 1, mtp_layers)
    layer = (deep.activation_bytes - shallow.activation_bytes) / 2
    costs = PartCosts(
        layer=PassTimes(1, 1),
        embedding=PassTimes(0, 0),
        head=PassTimes(0, 0),
        layer_activation_bytes=layer,
        head_activation_bytes=without.activation_bytes - layer,
    )
    stage = StageShape(
        kind="here",
        layers=(1,),
        has_embedding=False,
        has_head=True,
        micro_batch=8,
        recompute=recompute,
    )
    model = replace(model_shape(args), mtp_layers=mtp_layers, seq_length=64)
    composed = costs_of_mtp_memory(costs, costs, stage, model=model, options=TrainingOptions())
    predicted = layer + composed.head_activation_bytes
    assert predicted == pytest.approx(found.activation_bytes, rel=0.05)


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1 "
    "--moe-token-dispatcher-type alltoall"
).split()


@pytest.mark.usefixtures("preloaded_ranks")
@pytest.mark.parametrize(
    ("pattern", "has_dense"), [("[0,0,1,1]", True), ("1", False)], ids=["both", "sparse alone"]
)
def test_layers_with_experts_are_measured_beside_dense_ones_if_there_are_any(
    tmp_path: Path, pattern: str, has_dense: bool
) -> None:
    """By the command: what else this process has imported has compiled functions of routers."""
    out = tmp_path / "here.json"
    words = ["--out", str(out), "--accelerator", "one", "--recompute", "none", *LLAMA]
    command = [sys.executable, "-m", "hetero", "profile-layers", *words]
    layers = [*EXPERTS, "--moe-layer-freq", pattern]
    told = subprocess.run([*command, *layers], capture_output=True, text=True, check=True).stdout
    assert "with experts fwd" in told
    profile = load_profile(out)
    costs = profile.costs("one", Point(1, 1, 32))
    assert costs.sparse_layer.forward > 0
    assert costs.sparse_layer_activation_bytes > 0
    assert (costs.layer_activation_bytes > 0) is has_dense
    assert profile.model["num_experts"] == 4
    assert main(words) == 2  # it is the profile of another model now


FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise".split()


def test_layers_in_fp8_are_measured_beside_those_that_stay_in_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.json"
    words = [*FP8, "--first-last-layers-bf16", "--recompute", "none", "--accelerator", "one"]
    # A CPU keeps more of SwiGLU in bf16 than GPUs do, and as much as they where it is fused in fp8.
    profile_in_two_rounds("--out", str(out), *words, "--no-bias-swiglu-fusion")
    assert "tensorwise" in capsys.readouterr().out
    profile = load_profile(out)
    fp8, bf16 = (profile.costs("one", Point(1, 1, 32, fp8=own)) for own in ("tensorwise", "none"))
    predicted = AnalyticProfile(model_shape(model_arguments(LLAMA[:-4])), built_in_accelerators())
    change = [
        predicted.costs("H200", Point(1, 1, 32, fp8=own)).layer_activation_bytes
        for own in ("tensorwise", "none")
    ]
    # A CPU's attention keeps its output apart from the projection's input, which is halved then.
    saved = bf16.layer_activation_bytes - fp8.layer_activation_bytes
    assert saved == pytest.approx(change[1] - change[0] + 2 * 32 * 32, rel=0.02)


def test_a_profile_says_in_which_precision_it_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    own = ["--recompute", "none", "--accelerator", "one"]
    profile_in_two_rounds("--out", str(out), *FP8, "--no-fp8-wgrad", *own)
    (point,) = load_profile(out).accelerators["one"].points
    assert (point.fp8, point.fp8_weight_gradients) == ("tensorwise", False)


def test_sizes_that_fp8_products_cannot_have_are_refused(tmp_path: Path, refused: Refused) -> None:
    words = ["--out", str(tmp_path / "here.json"), "--accelerator", "H200", *LLAMA, *FP8]
    told = refused(main, [*words, "--sequence", "8", "--tensor", "1"])
    assert "fp8 products need multiples of 16" in told
    assert "--sequence 8" in told


def test_tensor_parallel_ranks_are_not_measured_alone_with_experts(
    tmp_path: Path, refused: Refused
) -> None:
    words = ["--out", tmp_path / "here.json", "--accelerator", "MI300X", *EXPERTS, *LLAMA]
    assert "--tensor 2: the tokens that tensor-" in refused(main, [*words, "--tensor", "2"])


def test_layers_with_latent_attention_are_not_measured(tmp_path: Path, refused: Refused) -> None:
    words = ["--out", tmp_path / "here.json", "--accelerator", "MI300X", *LLAMA]
    words = [word for word in words if word != "--group-query-attention"]
    told = refused(main, [*words, "--multi-latent-attention"])
    assert "layers with latent attention are not measured" in told
