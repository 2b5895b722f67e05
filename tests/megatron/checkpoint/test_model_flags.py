"""Every flag of the model is taken from a checkpoint, compared with it, or has no effect on it."""

from __future__ import annotations

import copy
import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.checkpoint.checkpoint_args import apply_checkpoint_args
from megatron.hetero.checkpoint.checkpointer import plain_args
from megatron.hetero.checkpoint.compatibility import require_same_model
from megatron.hetero.checkpoint.index import INDEX_FILE
from megatron.hetero.checkpoint.model_flags import (
    COMPARED,
    GROUPS,
    MODEL_FLAGS,
    TAKEN,
    Kind,
    spellings,
)
from tests.megatron.checkpoint.written_checkpoints import write
from tests.sentences import all_said_of, sentence_of

FOLDER = Path("runs/llama/iter_0000010")
RUN = (
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100"
)
SIZES = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8"
)
ROPE = "--position-embedding-type rope"
EXPERTS = (
    "--num-experts 8 --disable-bias-linear "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-shared-expert-intermediate-size 32"
)
CAPACITY = f"{EXPERTS} --moe-expert-capacity-factor 1"
PREDICTING = "--mtp-num-layers 1 --position-embedding-type rope"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"
NORMED = "--normalization RMSNorm --qk-layernorm"
LATENT = f"--multi-latent-attention {ROPE}"
# What is typed to have another value of a flag than `SIZES` alone give.
ANOTHER = {
    "num_layers": "--num-layers 3",
    "hidden_size": "--hidden-size 32",
    "ffn_hidden_size": "--ffn-hidden-size 48",
    "num_attention_heads": "--num-attention-heads 2",
    "kv_channels": "--kv-channels 8",
    "group_query_attention": "--group-query-attention --num-query-groups 2",
    "num_query_groups": "--group-query-attention --num-query-groups 2",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "swiglu": "--swiglu --ffn-hidden-size 64",
    "normalization": "--normalization RMSNorm",
    "add_bias_linear": "--disable-bias-linear --add-qkv-bias",
    "add_qkv_bias": "--disable-bias-linear",
    "qk_layernorm": "--qk-layernorm",
    "qk_layernorm_across_heads": f"{NORMED} --qk-layernorm-across-heads",
    "reordered_norm": "--reordered-norm",
    "softmax_scale": "--softmax-scale 0.5",
    "embedding_multiplier": "--embedding-multiplier 2",
    "residual_multiplier": "--residual-multiplier 0.5",
    "logits_scaling": "--logits-scaling 2",
    "max_position_embeddings": "--max-position-embeddings 16",
    "position_embedding_type": ROPE,
    "rotary_percent": f"{ROPE} --rotary-percent 0.5",
    "rotary_interleaved": f"{ROPE} --rotary-interleaved",
    "squared_relu": "--squared-relu",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "layernorm_epsilon": "--norm-epsilon 1e-6",
    "rotary_base": f"{ROPE} --rotary-base 500000",
    "rotary_seq_len_interpolation_factor": f"{ROPE} --rotary-seq-len-interpolation-factor 4",
    "use_rope_scaling": f"{ROPE} --use-rope-scaling",
    "rope_scaling_factor": f"{ROPE} --use-rope-scaling --rope-scaling-factor 32",
    "apply_query_key_layer_scaling": "--apply-query-key-layer-scaling",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "num_experts": f"{EXPERTS} --num-experts 16",
    "moe_layer_freq": f"{EXPERTS} --moe-layer-freq [0]+[1]",
    "moe_ffn_hidden_size": f"{EXPERTS} --moe-ffn-hidden-size 24",
    "moe_shared_expert_intermediate_size": f"{EXPERTS} --moe-shared-expert-intermediate-size 24",
    "moe_shared_expert_gate": f"{EXPERTS} --moe-shared-expert-gate",
    "moe_router_topk": f"{EXPERTS} --moe-router-topk 4",
    "moe_router_score_function": f"{EXPERTS} --moe-router-score-function sigmoid",
    "moe_router_pre_softmax": f"{EXPERTS} --moe-router-pre-softmax",
    "moe_router_num_groups": f"{EXPERTS} --moe-router-num-groups 4",
    "moe_router_group_topk": f"{EXPERTS} --moe-router-group-topk 2",
    "moe_router_topk_scaling_factor": f"{EXPERTS} --moe-router-topk-scaling-factor 2.5",
    "moe_router_enable_expert_bias": f"{SIGMOID} --moe-router-enable-expert-bias",
    "moe_router_load_balancing_type": f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss",
    "moe_expert_capacity_factor": f"{EXPERTS} --moe-expert-capacity-factor 2",
    "moe_pad_expert_input_to_capacity": f"{CAPACITY} --moe-pad-expert-input-to-capacity",
    "moe_token_drop_policy": f"{EXPERTS} --moe-token-drop-policy position",
    "moe_aux_loss_coeff": f"{EXPERTS} --moe-aux-loss-coeff 0.1",
    "moe_z_loss_coeff": f"{EXPERTS} --moe-z-loss-coeff 0.1",
    "moe_router_bias_update_rate": f"{EXPERTS} --moe-router-bias-update-rate 0.1",
    "moe_router_force_load_balancing": f"{EXPERTS} --moe-router-force-load-balancing",
    "multi_latent_attention": LATENT,
    "q_lora_rank": f"{LATENT} --q-lora-rank 8",
    "kv_lora_rank": f"{LATENT} --kv-lora-rank 8",
    "qk_head_dim": f"{LATENT} --qk-head-dim 8",
    "qk_pos_emb_head_dim": f"{LATENT} --qk-pos-emb-head-dim 8",
    "v_head_dim": f"{LATENT} --v-head-dim 8",
    "rope_type": f"{LATENT} --rope-type rope",
    "rotary_scaling_factor": f"{LATENT} --rotary-scaling-factor 4",
    "mscale": f"{LATENT} --mscale 0.7",
    "mscale_all_dim": f"{LATENT} --mscale-all-dim 0.7",
    "mtp_num_layers": f"{PREDICTING} --mtp-num-layers 2",
    "mtp_loss_scaling_factor": f"{PREDICTING} --mtp-loss-scaling-factor 0.3",
    "hidden_dropout": "--hidden-dropout 0",
    "attention_dropout": "--attention-dropout 0",
}
# What both sides have, so that only the one flag differs.
WITH = {
    **{name: ROPE for name in ANOTHER if name.startswith(("rotary_", "use_rope"))},
    "rope_scaling_factor": f"{ROPE} --use-rope-scaling",
    "qk_layernorm_across_heads": NORMED,
    "add_qkv_bias": "--disable-bias-linear --add-qkv-bias",
    **{name: EXPERTS for name in ANOTHER if name.startswith("moe_")},
    "num_experts": EXPERTS,
    "multi_latent_attention": ROPE,
    **{
        name: LATENT
        for name, words in ANOTHER.items()
        if words.startswith(LATENT) and name != "multi_latent_attention"
    },
    "mtp_num_layers": PREDICTING,
    "mtp_loss_scaling_factor": PREDICTING,
    "moe_router_enable_expert_bias": SIGMOID,
    "moe_pad_expert_input_to_capacity": CAPACITY,
}
COMPARED_FLAGS = sorted(name for name, flag in MODEL_FLAGS.items() if flag.kind in COMPARED)
SPELLED = spellings(build_parser())


def run(words: str) -> Namespace:
    """A run's arguments as they are when it looks at a checkpoint."""
    return copy.deepcopy(_run(words))


@functools.cache
def _run(words: str) -> Namespace:
    args = parse_args(f"{RUN} {words}".split(), world_size=1)
    args.tokenizer_vocab_size, args.tokenizer_digest = 101, "abc"
    return args


def written_by(words: str, **changes: Any) -> dict[str, Any]:
    """What the index of a checkpoint of such a run says."""
    return {**plain_args(run(words)), **changes}


def compare(stored: dict[str, Any], words: str, *, weights_only: bool = False) -> tuple[str, ...]:
    return require_same_model(
        stored,
        run(words),
        folder=FOLDER,
        weights_only=weights_only,
        loads_optimizer=not weights_only,
    )


def refusal(stored: dict[str, Any], words: str, *, weights_only: bool = False) -> str:
    return sentence_of(compare, stored, words, weights_only=weights_only)


def adopted(stored: dict[str, Any], words: str = "", *, weights_only: bool = False) -> Namespace:
    """The arguments that --use-checkpoint-args makes of `words`, not checked yet."""
    parser = build_parser()
    args = parser.parse_args(words.split())
    args.typed_flags = tuple(word for word in words.split() if word.startswith("--"))
    args.ignored_flags = []
    apply_checkpoint_args(args, stored, folder=FOLDER, weights_only=weights_only, parser=parser)
    return args


def contradiction(stored: dict[str, Any], words: str, *, weights_only: bool = False) -> str:
    return all_said_of(adopted, stored, words, weights_only=weights_only)


def test_every_flag_of_the_model_is_in_the_table_and_tested_here() -> None:
    groups = {g.title: g._group_actions for g in build_parser()._action_groups}
    assert set(GROUPS) <= set(groups)
    flags = {action.dest for title in GROUPS for action in groups[title]}
    assert flags - set(MODEL_FLAGS) == set(), "say in model_flags.py what these do to the model"
    assert set(MODEL_FLAGS) - flags == set()
    assert all(flag.why for flag in MODEL_FLAGS.values())
    assert sorted(ANOTHER) == COMPARED_FLAGS
    taken = {name for name, flag in MODEL_FLAGS.items() if flag.kind in TAKEN}
    assert taken <= set(written_by(SIZES)), "a run writes down all that is taken"


@pytest.mark.parametrize("name", COMPARED_FLAGS)
def test_a_run_with_another_value_is_refused(name: str) -> None:
    here = f"{SIZES} {WITH.get(name, '')}"
    stored = written_by(f"{SIZES} {ANOTHER[name]}")
    for weights_only in (False, True):
        said = refusal(stored, here, weights_only=weights_only)
        assert f"{SPELLED[name].option} is " in said
        assert "--use-checkpoint-args" in said


@pytest.mark.parametrize("name", COMPARED_FLAGS)
def test_a_run_takes_every_value_of_a_checkpoint(name: str) -> None:
    words = f"{SIZES} {ANOTHER[name]}"
    stored = written_by(words)
    taken = adopted(stored)
    assert getattr(taken, name) == stored[name]
    (line,) = taken.taken_flags
    assert line.startswith(f"taken from {FOLDER}: ")
    assert SPELLED[name].option in line or name == "add_qkv_bias"


@pytest.mark.parametrize("words", ["", *sorted(ANOTHER.values())])
def test_a_run_with_the_same_flags_goes_on_without_a_word(words: str) -> None:
    stored = written_by(f"{SIZES} {words}")
    for weights_only in (False, True):
        assert compare(stored, f"{SIZES} {words}", weights_only=weights_only) == ()


def test_all_that_differs_is_told_at_once_with_what_to_do() -> None:
    stored = written_by(f"{SIZES} --apply-layernorm-1p --norm-epsilon 1e-6", optimizer="sgd")
    said = refusal(stored, f"{SIZES} --hidden-size 32 --squared-relu --disable-bias-linear")
    for words in (
        "--hidden-size is 16 there and 32 here,",
        "--squared-relu is off there and on here,",
        "--disable-bias-linear is off there and on here,",
        "--apply-layernorm-1p is on there and off here by default",
        "--norm-epsilon is 1e-06 there and 1e-05 here by default",
        "start with --hidden-size 16 ",
        "--apply-layernorm-1p",
        "leave out --disable-bias-linear --squared-relu",
        "has the state of --optimizer sgd",
    ):
        assert words in said


def test_what_does_not_act_is_not_compared() -> None:
    """RoPE's flags without RoPE, positions that are not learned, GeLU's without GeLU, groups of
    which there are as many as heads."""
    fused = written_by(f"{SIZES} --squared-relu --no-bias-gelu-fusion")
    assert compare(fused, f"{SIZES} --squared-relu") == ()
    assert compare(written_by(f"{SIZES} --rotary-base 5"), SIZES) == ()
    longer = written_by(f"{SIZES} {ROPE} --max-position-embeddings 16")
    assert compare(longer, f"{SIZES} {ROPE}") == ()
    groups = f"{SIZES} --group-query-attention --num-query-groups 4"
    assert compare(written_by(SIZES), groups) == compare(written_by(groups), SIZES) == ()


def test_a_period_of_layers_is_the_list_that_it_stands_for() -> None:
    every = written_by(f"{SIZES} {EXPERTS} --moe-layer-freq 1")
    listed = f"{SIZES} {EXPERTS} --moe-layer-freq [1]*2"
    assert compare(every, listed) == ()
    first = f"{SIZES} {EXPERTS} --moe-layer-freq [1]*1+[0]*1"
    assert compare(written_by(first), f"{SIZES} {EXPERTS} --moe-layer-freq 2") == ()
    assert "start with --moe-layer-freq [1]*1+[0]*1, or" in refusal(written_by(first), listed)


def test_a_factor_of_one_is_none() -> None:
    factor = f"{SIZES} {EXPERTS} --moe-router-topk-scaling-factor 1.0"
    assert compare(written_by(factor), f"{SIZES} {EXPERTS}") == ()


@pytest.mark.parametrize("name", sorted(set(COMPARED_FLAGS) - {"add_qkv_bias", "swiglu"}))
def test_another_value_that_is_typed(name: str) -> None:
    """A run from weights alone may tune what it types, any run its dropout, none the rest."""
    stored = written_by(f"{SIZES} {WITH.get(name, '')}")
    words = f"{SIZES} {ANOTHER[name]}"
    kind = MODEL_FLAGS[name].kind
    for weights_only, may in (
        (False, kind is Kind.TRAINING),
        (True, kind in (Kind.TRAINING, Kind.TUNABLE)),
    ):
        if may:
            (line,) = compare(stored, words, weights_only=weights_only)
            assert line.startswith("as typed, not as in the checkpoint: ")
            value = getattr(adopted(stored, words, weights_only=weights_only), name)
            assert value == getattr(run(words), name)
        else:
            assert SPELLED[name].option in refusal(stored, words, weights_only=weights_only)
            said = contradiction(stored, words, weights_only=weights_only)
            assert "the command line contradicts the checkpoint" in said
            assert f"{SPELLED[name].option} is " in said


def test_every_contradiction_of_the_command_line_is_told_at_once() -> None:
    stored = written_by(SIZES, padded_vocab_size=128)
    typed = "--hidden-size 99 --swiglu --padded-vocab-size 256 --use-rotary-position-embeddings"
    said = contradiction(stored, typed)
    for words in (
        "--hidden-size is 16 there and 99 here",
        "--swiglu is off there and on here",
        "--padded-vocab-size is 128 there and 256 here",
        "--position-embedding-type is learned_absolute there and rope here",
        "leave out --hidden-size",
    ):
        assert words in said
    assert "--finetune may have another --norm-epsilon" in contradiction(
        stored, "--norm-epsilon 1e-6"
    )


def test_what_is_typed_and_agrees_is_no_contradiction() -> None:
    words = f"{SIZES} {ROPE} --squared-relu --disable-bias-linear --norm-epsilon 1e-6"
    args = adopted(written_by(words), words)
    assert args.taken_flags[0].split(": ")[1].startswith("--ffn-hidden-size")


def test_rows_of_the_vocabulary_are_the_checkpoint_s() -> None:
    stored = written_by(SIZES, padded_vocab_size=128)
    assert adopted(stored).padded_vocab_size == 128
    assert adopted(stored, "--padded-vocab-size 128").padded_vocab_size == 128
    args = adopted(stored, "--make-vocab-size-divisible-by 7")
    assert args.ignored_flags == [
        "--make-vocab-size-divisible-by: --use-checkpoint-args takes the checkpoint's 128 rows"
    ]
    unsaid = {name: value for name, value in stored.items() if name != "padded_vocab_size"}
    assert adopted(unsaid, "--padded-vocab-size 256").padded_vocab_size == 256
    (line,) = compare(stored, f"{SIZES} --padded-vocab-size 256")
    assert "has 128 rows of vocabulary and this run 256" in line


def test_a_tokenizer_is_taken_whole_or_not_at_all() -> None:
    stored = written_by(SIZES, tokenizer_type="TikTokenizer", tiktoken_special_tokens=["a", "b"])
    args = adopted(stored)
    assert (args.tokenizer_type, args.tiktoken_special_tokens) == ("TikTokenizer", ["a", "b"])
    assert "--tiktoken-special-tokens a b" in args.taken_flags[0]
    assert adopted(stored, "--tokenizer-type TikTokenizer").tiktoken_special_tokens == ["a", "b"]
    assert adopted(stored, "--tokenizer-type NullTokenizer").tiktoken_special_tokens is None
    assert not adopted(written_by(SIZES, trust_remote_code=True)).trust_remote_code


def test_another_tokenizer_is_refused() -> None:
    stored = written_by(SIZES)
    assert "100 tokens and this run's has 101" in refusal(
        stored | {"tokenizer_vocab_size": 100}, SIZES, weights_only=True
    )
    other = stored | {"tokenizer_digest": "def"}
    assert "another tokenizer of the same size" in refusal(other, SIZES)
    (line,) = compare(other, SIZES, weights_only=True)
    assert "another tokenizer of the same size" in line


def test_a_flag_missing_in_the_checkpoint_was_off_in_training() -> None:
    stored = written_by(SIZES)
    del stored["layernorm_zero_centered_gamma"]
    assert compare(stored, SIZES) == ()
    said = refusal(stored, f"{SIZES} --apply-layernorm-1p")
    assert "--apply-layernorm-1p is off there and on here" in said
    stored = {"num_layers": 2, "hidden_size": 16}
    assert compare(stored, SIZES, weights_only=True) == ()
    (line,) = compare(stored, f"{SIZES} --apply-layernorm-1p", weights_only=True)
    assert line == f"the checkpoint {FOLDER} does not say; as in this run: --apply-layernorm-1p"
    assert adopted(stored, "--apply-layernorm-1p").layernorm_zero_centered_gamma


def test_positions_of_no_kind_come_out_of_a_checkpoint(tmp_path: Path) -> None:
    folder = _save(tmp_path, f"{SIZES} --position-embedding-type none")
    args = _resume(folder)
    assert args.position_embedding_type == "none"
    assert args.use_checkpoint_args


def test_the_model_of_weights_to_start_from_is_taken_at_the_first_start(tmp_path: Path) -> None:
    base = _save(tmp_path / "base", SIZES)
    args = _resume(tmp_path / "run", f"--pretrained-checkpoint {base} --norm-epsilon 1e-6")
    assert (args.num_layers, args.layernorm_epsilon) == (2, 1e-6)
    _save(tmp_path / "run", f"{SIZES} --num-layers 3")
    assert _resume(tmp_path / "run", f"--pretrained-checkpoint {base}").num_layers == 3


def test_where_there_is_no_checkpoint_yet_the_flags_are_the_model_s(tmp_path: Path) -> None:
    args = _resume(tmp_path, SIZES)
    assert not args.use_checkpoint_args
    why = f"there is no checkpoint in {tmp_path} yet"
    assert f"--use-checkpoint-args: {why}" in args.ignored_flags
    with pytest.raises(UserError, match="to take --num-layers, --hidden-size"):
        _resume(tmp_path)
    # One that cannot be read is no new start, nor is one of Megatron-LM.
    index = _save(tmp_path, SIZES) / "iter_0000010" / INDEX_FILE
    index.write_text("{")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
        _resume(tmp_path, SIZES)
    index.rename(index.with_name(".metadata"))
    with pytest.raises(UserError, match=f"import-megatron {tmp_path} "):
        _resume(tmp_path, SIZES)


def _save(folder: Path, words: str) -> Path:
    """A checkpoint as far as its flags are concerned."""
    write(folder / "iter_0000010", {}, args=written_by(words), iteration=10)
    return folder


def _resume(load: Path, words: str = "") -> Namespace:
    return parse_args(f"{RUN} --load {load} --use-checkpoint-args {words}".split(), world_size=1)
