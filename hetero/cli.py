"""The command `hetero`: every program that users start, under one name.

    hetero pretrain --standalone --nproc-per-node 2 --yaml-cfg tiny ...
    hetero plan --help

`python -m hetero` is the same where the command is not on PATH. A command is its module's `main`,
and `python tools/plan.py` in a checkout is `hetero plan`. Only the chosen module is imported, so
that `hetero --help` does not wait for torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from hetero.errors import LinkError, UserError, print_error
from hetero.tools.tool_command_line import leave_on_interrupt
from hetero.version import __version__, exit_if_other_megatron, exit_unless_installed

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program and what it needs before its module is imported."""

    module: str
    """Its `main` takes the words behind the command's name and returns the exit code."""
    help: str
    needs: str = "torch"
    """The package without which it can do nothing."""
    needs_core: bool = True
    """Whether it imports megatron-core."""
    starts_ranks: bool = False
    """Whether flags of `hetero run` may stand first: then it starts that many processes."""
    handles_interrupts: bool = False
    """Whether it answers Ctrl-C by itself. For others it is answered while they are imported."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that torch reads at its import, set where they are not."""


COMMANDS = {
    "run": Command(
        module="hetero.run", help="start a program on the processes of this node, as torchrun does"
    ),
    "pretrain": Command(
        module="megatron.hetero.pretrain",
        help="train a model, on one vendor's GPUs or across two",
        starts_ranks=True,
        handles_interrupts=True,
    ),
    "plan": Command(
        module="hetero.tools.plan",
        help="find the fastest plan for a model on a cluster",
        needs="numpy",
        needs_core=False,
    ),
    "check-plan": Command(
        module="hetero.tools.check_plan",
        help="check a plan file and draw where each rank is placed",
        needs="yaml",
        needs_core=False,
    ),
    "preflight": Command(
        module="hetero.tools.preflight",
        help="check this node, or all nodes of a job, before training",
        needs_core=False,  # another megatron-core is a finding
        starts_ranks=True,
        # Its ranks wait for each other in slices. PyTorch would report the end of each one.
        environment={"TORCH_CPP_LOG_LEVEL": "ERROR"},
    ),
    "verify": Command(
        module="hetero.tools.verify",
        help="verify nodes of two vendors before the first run, and write a report to send",
        needs_core=False,  # another megatron-core is a finding
        environment={"TORCH_CPP_LOG_LEVEL": "ERROR"},
    ),
    "perf": Command(
        module="hetero.tools.perf",
        help="measure links and collectives beside gloo, NCCL and the bare paths",
        needs_core=False,
    ),
    "convert": Command(
        module="hetero.tools.convert_checkpoint",
        help="convert checkpoints from and to Hugging Face's and Megatron-LM's formats",
    ),
    "generate": Command(
        module="hetero.tools.generate_text", help="complete a prompt with a trained model"
    ),
    "preprocess-data": Command(
        module="hetero.tools.preprocess_data", help="turn text into the token files of training"
    ),
    "inspect-data": Command(
        module="hetero.tools.inspect_data", help="show and check the content of token files"
    ),
    "merge-datasets": Command(
        module="hetero.tools.merge_datasets", help="join several token files into one"
    ),
    "train-tokenizer": Command(
        module="hetero.tools.train_tokenizer", help="train a SentencePiece tokenizer from text"
    ),
    "profile-layers": Command(
        module="hetero.tools.profile_layers",
        help="measure a model's layers on this GPU, for `hetero plan`",
    ),
    "compare-loss": Command(
        module="hetero.tools.compare_loss",
        help="decide from metrics files whether two runs train the same model",
        needs="numpy",
        needs_core=False,
    ),
    "top": Command(
        module="hetero.tools.top",
        help="show a run while it runs, in a terminal",
        needs="rich",
        needs_core=False,
    ),
    "break-things": Command(
        module="hetero.tools.break_things",
        help="put faults into a running job at random, to see what it survives",
        needs="psutil",
        needs_core=False,
    ),
    "trace": Command(
        module="hetero.tools.trace",
        help="tell where the time of traced steps went, beside a prediction of them",
        needs="numpy",
        needs_core=False,
    ),
    "compare-ops": Command(
        module="hetero.tools.compare_ops",
        help="compare a layer's operators on two devices, to tell rounding from a bug",
    ),
    "prove-parity": Command(
        module="hetero.tools.prove_parity",
        help="run a model mixed and homogeneous, and compare every bit",
    ),
}

WITHOUT_VALUE = frozenset({"--standalone", "--virtual-local-rank"})
WITH_VALUE = frozenset(
    f"--{name}"
    for name in (
        *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "role"),
        *("monitor-interval", "start-method", "event-log-handler", "log-dir", "redirects", "tee"),
        *("local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters"),
        *("logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout"),
    )
)
"""Flags of torchrun, written down here so that no command has to import torch to tell them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 2 for bad input, as for every program here."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else UserError.exit_code
    name, rest = words[0], words[1:]
    if name == "--version":
        print(f"hetero-megatron {__version__}")
        return 0
    if name not in COMMANDS:
        print_error(_unknown(name))
        return UserError.exit_code
    if name == "run":
        # A program of its own, which other launchers start too: it has to be a fresh process.
        os.execv(sys.executable, [sys.executable, "-m", COMMANDS[name].module, *rest])
    command = COMMANDS[name]
    if command.starts_ranks:
        launcher, own = launcher_flags(rest)
        if launcher:
            environ = rank_environment(os.environ)
            run = [sys.executable, "-m", "hetero.run", *launcher, *rank_command(name), *own]
            os.execve(sys.executable, run, environ)
    _begin(command)
    sys.argv = [f"hetero {name}", *rest]  # argparse shows it as the program's name
    try:
        module = import_module(command.module)
    except LinkError as error:  # the library in C is not built, or older than its sources
        print_error(str(error))
        return error.exit_code
    return int(module.main(rest))


def rank_command(name: str) -> tuple[str, ...]:
    """What `hetero.run` starts as each rank of a command."""
    return ("-m", "hetero", name)


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a rank finds this installation, and nothing else of its folder.

    `python -m` puts the current folder first, which may hold another `megatron`.
    """
    found = dict(environ)
    if (_ROOT / "setup.py").is_file():  # a checkout, which may not be installed
        found["PYTHONPATH"] = os.pathsep.join(
            [str(_ROOT), *filter(None, [environ.get("PYTHONPATH")])]
        )
    return found | {"PYTHONSAFEPATH": "1"}


def launcher_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of `hetero run` that stand first, with their values, and the words behind them."""
    at = 0
    while at < len(words):
        flag, equals, _ = words[at].partition("=")
        flag = flag.replace("_", "-")
        if flag in WITHOUT_VALUE or (flag in WITH_VALUE and equals):
            at += 1
        elif flag in WITH_VALUE:
            at += 2
        else:
            break
    return list(words[:at]), list(words[at:])


def _begin(command: Command) -> None:
    """What has to happen before the command's longer imports."""
    if not command.handles_interrupts:
        leave_on_interrupt()
    exit_unless_installed(command.needs)
    exit_if_other_megatron(core=command.needs_core)
    for name, value in command.environment.items():
        os.environ.setdefault(name, value)


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(
        [
            "usage: hetero COMMAND ...",
            "",
            "Train one language model across NVIDIA and AMD GPUs, with Megatron-LM's flags.",
            "",
            *(f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items()),
            "",
            "`hetero COMMAND --help` lists a command's flags; `hetero --version` is the version.",
        ]
    )


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean `hetero {near[0]}`? " if near else ""
    return f"{name!r} is not a command; {hint}`hetero --help` lists the commands"


if __name__ == "__main__":
    sys.exit(main())
