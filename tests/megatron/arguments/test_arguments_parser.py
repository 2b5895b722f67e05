"""How words become arguments: help, the environment, slips of the finger, flags left out."""

from difflib import SequenceMatcher

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.arguments.unknown import (
    all_unsupported_flags,
    explain_unknown,
    features,
)
from tests.commands import ended
from tests.sentences import all_said_of

KNOWN = sorted(build_parser().flags)


def test_help_names_every_flag_and_ends_well(capsys):
    with pytest.raises(SystemExit) as ending:
        parse_args(["--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert [flag for flag in KNOWN if flag not in shown] == []


def test_the_world_size_comes_from_the_environment(parse, refusal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse(world_size=None).data_parallel_size == 4
    monkeypatch.setenv("RANK", "two")
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert "the environment has RANK='two', LOCAL_RANK='-1'" in refusal(world_size=None)


def test_a_flag_is_offered_or_left_out_and_left_out_once():
    flags = list(all_unsupported_flags())
    assert set(flags).isdisjoint(KNOWN)
    assert len(flags) == len(set(flags))
    switches = {flag for feature in features() for flag in feature.switches}
    assert switches <= set(flags)


@pytest.mark.parametrize("feature", features(), ids=lambda feature: feature.detail or "each")
def test_left_out_flags_at_their_defaults_are_taken_in_silence(parse, feature):
    words = [
        f"{option.flag} {option.default}"
        for option in feature.options.values()
        if option.arity != "0" and option.default != "none"
    ]
    assert parse(" ".join(words)).ignored_flags == []


def likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, other, one).ratio()


LONG_FLAGS = [flag for flag in KNOWN if len(flag) >= 10]


@settings(deadline=None)
@given(
    flag=st.sampled_from(LONG_FLAGS),
    where=st.floats(0, 1, exclude_max=True),
    slip=st.sampled_from(["lose", "double", "swap"]),
)
def test_a_slip_of_the_finger_is_answered_with_a_flag_as_like_as_the_one_meant(flag, where, slip):
    at = 2 + int(where * (len(flag) - 3))
    typed = {
        "lose": flag[:at] + flag[at + 1 :],
        "double": flag[:at] + flag[at] + flag[at:],
        "swap": flag[:at] + flag[at + 1] + flag[at] + flag[at + 2 :],
    }[slip]
    assume(typed not in KNOWN)
    sentence = explain_unknown(typed, KNOWN)
    assert sentence.startswith(f"{typed} is not a flag of this program; did you mean --")
    meant = sentence.removesuffix("?").split()[-1]
    assert meant in KNOWN
    plain = [word.replace("_", "-") for word in (typed, meant, flag)]
    assert likeness(*plain[:2]) >= likeness(*plain[::2])


def test_everything_wrong_is_told_at_once_and_nothing_that_follows_from_it(parse):
    launch = (
        "--num-layer 4 --lr fast --seed 0 --bf16 --fp16 --moe-latent-size 8 "
        "--deepspeed stray --data-cache-path --optimizer lion --hidden-size 100 "
        "--global-batch-size 3 --use-mpi"
    )
    first, *sentences = all_said_of(parse, launch, without="--num-layers").split("\n  ")
    assert first == f"{len(sentences)} errors:"
    told = [
        "did you mean --num-layers?",
        "--deepspeed is not a flag",
        "--use-mpi is not a flag",
        "--moe-latent-size is a flag of mixture-of-experts models",
        "--lr must be",
        "--seed must be",
        "--data-cache-path lacks a value",
        "--optimizer cannot be 'lion'",
        "--bf16 and --fp16 exclude",
        "a global batch of 3 must be a multiple",
    ]
    for words in told:
        assert sum(words in sentence for sentence in sentences) == 1, words
    # `stray` is taken for a value of --deepspeed; the layers, the rate and the rest are not judged.
    assert len(sentences) == len(told), sentences


def test_windows_line_ends_of_a_script_are_no_part_of_a_word(parse):
    args = parse("'--bf16\r' --lr '1e-4\r' '\r' '--save=/a\r' --optimizer 'sgd\r'")
    assert (args.bf16, args.lr, args.save, args.optimizer) == (True, 1e-4, "/a", "sgd")


YAML = "num-layers: many\nfp8: e4m3\n"
PLAN = "meshes: [{vendor: intel, layers: [8]}]"


@pytest.mark.parametrize(
    "flags",
    [
        *("--num-layer 3 --lr fast", "--help", "--moe-latent-size 8", "--yaml-cfg run.yaml"),
        "--hetero-pipeline --hetero-plan plan.yaml",
    ],
)
def test_a_refusal_and_help_need_neither_torch_nor_megatron_core(flags, tmp_path):
    """From each source: flags, a YAML file, a plan file."""
    for name, text in (("run.yaml", YAML), ("plan.yaml", PLAN)):
        (tmp_path / name).write_text(text)
        flags = flags.replace(name, str(tmp_path / name))
    code = (
        "import atexit, os, sys\n"
        "slow = lambda: [m for m in ('torch', 'megatron.core', 'numpy') if m in sys.modules]\n"
        "end = os._exit\n"
        "os._exit = lambda code: (print('slow', slow(), flush=True), end(code))\n"
        "atexit.register(lambda: print('slow', slow(), flush=True))\n"
        "from megatron.hetero import pretrain\n"
        f"pretrain.main({flags.split()!r})\n"
    )
    done = ended("-c", code)
    assert done.stdout.rstrip().endswith("slow []")
    assert done.returncode == (0 if flags == "--help" else 2)
    assert ("error: " in done.stderr) == (flags != "--help")
    expected = {"run.yaml": "num-layers", "plan.yaml": "vendor 'intel' must be one of"}
    assert all(said in done.stderr for name, said in expected.items() if name in flags)
