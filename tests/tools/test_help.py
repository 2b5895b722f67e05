"""--help of every tool and of the training program: what a flag is worth, and no noise."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.tools import inspect_data
from megatron.hetero.arguments.parser import build_parser
from tests.commands import ROOT

SHARED = {"__init__", "tool_command_line", "runs", "text_input"}
"""What tools have in common, which nobody starts."""
MODULES = [
    *(
        f"{package}.{path.stem}"
        for package in ("hetero.tools", "bench")
        for path in sorted(ROOT.glob(f"{package.replace('.', '/')}/*.py"))
        if path.stem not in SHARED
    ),
    "examples.quickstart.demo",
]
NOISE = re.compile(r"\(default: (?:None|False|True|\[\]|)\)|==SUPPRESS==|\bNone\b|%\(")
UNITS = (
    *("second", "minute", "iteration", "step", "sample", "token", "sequence", "byte", "MiB", "KiB"),
    *("layer", "rank", "stage", "process", "document", "connection", "GPU", "element", "size"),
    *("times", "threads", "number", "share", "probability", "factor", "seed", "dropout", "chunk"),
    *("batches", "model's", "samples", "letters", "characters", "level", "pairs", "line", "head"),
)
PURE = (
    *("--rotary-base", "--initial-loss-scale", "--min-loss-scale", "--lr", "--min-lr"),
    *("--lr-warmup-init", "--adam-beta1", "--adam-beta2", "--adam-eps", "--weight-decay"),
    *("--clip-grad", "--sgd-momentum", "--norm-epsilon", "--init-method-std", "--hysteresis"),
)
"""Numbers of no unit."""


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers_of(command)


@pytest.fixture(scope="module")
def parsers() -> dict[str, list[argparse.ArgumentParser]]:
    """Of every program, its parser and those of its commands."""
    found: dict[str, list[argparse.ArgumentParser]] = {}
    with pytest.MonkeyPatch.context() as patched:
        for name in MODULES:

            def keep(self: argparse.ArgumentParser, name: str = name, file: object = None) -> None:
                found[name] = list(parsers_of(self))

            patched.setattr(argparse.ArgumentParser, "print_help", keep)
            module = importlib.import_module(name)
            # PYTHONOPTIMIZE=2 leaves all docstrings out.
            patched.setattr(module, "__doc__", None)
            with pytest.raises(SystemExit) as ended:
                module.main(["--help"])
            assert ended.value.code == 0
    return found | {"pretrain_gpt": list(parsers_of(build_parser()))}


@pytest.fixture(params=[*MODULES, "pretrain_gpt"])
def program(request, parsers) -> list[argparse.ArgumentParser]:
    return parsers[request.param]


def test_a_default_is_shown_only_where_it_says_something(program) -> None:
    for parser in program:
        assert NOISE.findall(" ".join(parser.format_help().split())) == []


def test_no_flag_may_be_abbreviated(program) -> None:
    assert not any(parser.allow_abbrev for parser in program)


def test_every_flag_has_help(program) -> None:
    missing = [
        action.option_strings or action.dest
        for parser in program
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert missing == []


def test_the_help_of_a_number_says_of_what(program) -> None:
    silent = [
        (action.option_strings[0], action.help)
        for parser in program
        for action in parser._actions
        if action.option_strings
        and isinstance(action.default, int | float)
        and not isinstance(action.default, bool)
        and action.help != argparse.SUPPRESS
        and action.option_strings[0] not in PURE
        and not any(unit in f"{action.option_strings[0]} {action.help}" for unit in UNITS)
    ]
    assert silent == []


@pytest.mark.parametrize("name", MODULES)
def test_the_first_line_of_a_tools_docstring_is_a_sentence(name: str) -> None:
    """It is what --help says that the tool is for."""
    source = ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text()
    assert (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].endswith(".")


def test_a_default_is_shown_once(program) -> None:
    helps = [text for parser in program for text in parser.format_help().split("\n  --")]
    assert [text for text in helps if text.count("(default: ") > 1] == []


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]+")
DECLARES = ("add_argument", "add_parser")
TRAINS = {
    *("hetero.tools.prove_parity", "bench.reproduce_table", "bench.benchmark_parity"),
    *("hetero.tools.compare_ops", "bench.list_flags", "bench.prove_meshes"),
    *("bench.measure_overlap", "hetero.tools.check_plan"),
    *("bench.compare_versions", "bench.signal_table", "bench.fault_table"),
    *("bench.async_save", "bench.mesh_ablation", "bench.record_cost"),
    "bench.operator_watch_cost",
    "bench.memory_checkpoint_cost",
    "bench.random_faults",
    *("bench.restart_times", "bench.goodput", "bench.long_context"),
    *("bench.expert_speed", "bench.fp8_speed", "bench.fp8_losses", "bench.public_commands"),
}
"""Tools that take the training program's flags behind their own, or give it some."""
STARTS = {
    "bench.time_preprocessing": {
        *("--quiet", "--disable-pip-version-check", "--target"),
        *("--input", "--output-prefix", "--overwrite", "--tokenizer-type", "--tokenizer-model"),
        *("--workers", "--log-interval", "--vocab-size"),
    },
    "bench.run_versions": {"--junitxml"},
    "bench.expert_speed": {"--nproc-per-node", "--standalone"},
    "bench.fp8_speed": {"--nproc-per-node", "--standalone", "--fp8", "--compiled"},
    "bench.public_commands": {"--experimental-attention-variant", "--fp4-format"},
    "bench.record_cost": {"--nproc-per-node"},
    "bench.operator_watch_cost": {"--nproc-per-node"},
    "bench.memory_checkpoint_cost": {"--nproc-per-node"},
    "bench.signal_table": {"--nproc-per-node", "--master-addr", "--master-port"},
    "bench.random_faults": {
        *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"),
        *("--standalone", "--hetero-restarts", "--rdzv-conf", "--rdzv-backend", "--rdzv-endpoint"),
        *("--rdzv-id", "--seed", "--every", "--minutes", "--burst", "--faults", "--seconds"),
        *("--interfaces", "--down", "--hetero-fallback"),
    },
    "bench.restart_times": {
        *("--hetero-restarts", "--max-restarts", "--hetero-fallback", "--nnodes"),
    },
    "bench.long_context": {
        *("--nproc-per-node", "--standalone"),
        *("--layers", "--hidden", "--ffn", "--heads", "--groups", "--vocabulary", "--steps"),
        "--sequence",
    },
    "bench.goodput": {"--hetero-restarts", "--max-restarts"},
}
"""Flags that a tool gives to pytest, to pip, to hetero.run or to another tool."""


def said(path: Path) -> Iterator[tuple[str, str]]:
    """Every flag in a text of a module, docstrings and declarations of flags left out."""
    tree = ast.parse(path.read_text())
    left_out: set[int] = set()
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, ast.Expr):  # a docstring
            left_out.add(id(node.value))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in DECLARES:
            left_out |= {id(part) for part in (*node.args, *(k.value for k in node.keywords))}
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(value) for value in node.values}
            text = "".join(v.value for v in node.values if isinstance(v, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        for flag in FLAG.findall(text):
            yield flag, text


@pytest.mark.parametrize("module", MODULES)
def test_a_tool_speaks_of_no_flag_that_it_lacks(module: str, parsers) -> None:
    def flags_of(name: str) -> set[str]:
        actions = [action for parser in parsers[name] for action in parser._actions]
        return {flag for action in actions for flag in action.option_strings}

    def named(module: str, text: str) -> bool:
        return module in text or f"hetero {module.replace('_', '-')}" in text

    own = flags_of(module) | (flags_of("pretrain_gpt") if module in TRAINS else set())
    own |= STARTS.get(module, set())
    # What is said of training is said of its flags.
    others = {name.rsplit(".", 1)[-1]: flags_of(name) for name in parsers}
    path = ROOT / f"{module.replace('.', '/')}.py"
    unknown = [
        (flag, text)
        for flag, text in said(path)
        if flag not in own
        and not any(flag in flags for name, flags in others.items() if named(name, text))
        and not ("train" in text and flag in others["pretrain_gpt"])
        # Megatron-LM's own program has flags that are not offered here.
        and "Megatron-LM" not in text
    ]
    assert unknown == []


def test_inspect_data_advises_what_it_can_be_given(capsys, tmp_path, parsers) -> None:
    flags = {
        flag
        for action in parsers["hetero.tools.inspect_data"][0]._actions
        for flag in action.option_strings
    }
    prefix = tmp_path / "absent"
    kinds = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer")
    for words in ((), *(("--tokenizer-type", kind) for kind in (*kinds, "NullTokenizer"))):
        assert inspect_data.main([str(prefix), *words]) == 2
        sentence = capsys.readouterr().err
        assert set(FLAG.findall(sentence)) <= flags, sentence
