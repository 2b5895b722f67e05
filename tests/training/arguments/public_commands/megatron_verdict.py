"""Whether Megatron-LM itself accepts command lines: its own parser and checks, run without a GPU.

PYTHONPATH=MEGATRON-LM-CHECKOUT python megatron_verdict.py < commands.json > verdicts.json
PYTHONPATH=MEGATRON-LM-CHECKOUT python megatron_verdict.py --flags > flags.json

Reads a list of {"words", "gpus", "environment"}, writes a list of verdicts: null where accepted,
otherwise Megatron's complaint. The machine is taken to be what NVIDIA's scripts are written for: a
Hopper GPU with a recent Transformer Engine. Modules that only kernels need are stood in for.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import types
from unittest.mock import MagicMock

STOOD_IN_FOR = ("triton", "six", "nvidia_resiliency_ext", "torch_memory_saver")
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


class _Anything(types.ModuleType):
    __path__ = ()
    __version__ = "3.4.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STOOD_IN_FOR:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


def _megatron():
    # torch looks for triton itself, and must not find what stands in for it.
    import torch._inductor.test_operators
    import torch.utils.flop_counter

    torch.compile = lambda function=None, **_: function or (lambda inner: inner)
    sys.meta_path.append(_Finder())
    from megatron.core.models.common.embeddings import rope_utils

    from megatron.training import arguments

    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb or MagicMock()
    arguments.is_te_min_version = lambda *_, **__: True
    arguments.get_device_arch_version = lambda: 9
    arguments.torch.cuda.get_device_capability = lambda *_: (9, 0)
    return arguments


def verdict(arguments, command):
    """None, or why Megatron refuses `command`."""
    # What NVIDIA's guide says to set, and what the script set itself.
    sharded = any("fsdp" in word for word in command["words"])
    usual = {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if sharded else "1"}
    environment = {**usual, **command["environment"]}
    os.environ.update(environment, WORLD_SIZE=str(command["gpus"]), RANK="0")
    sys.argv = ["pretrain_gpt.py", *command["words"]]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            args = arguments.parse_args()
            arguments.validate_args(args, DEFAULTS)
            _start(arguments, args)
    except SystemExit:
        lines = said.getvalue().strip().splitlines()
        return lines[-1].split("error: ")[-1] if lines else "the parser ended"
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        for name in (*environment, "WORLD_SIZE", "RANK"):
            os.environ.pop(name, None)
    return None


def _start(arguments, args):
    """What Megatron checks of the sizes right after its arguments, before it builds anything."""
    from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator

    _build_num_microbatches_calculator(
        0,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
    )
    arguments.core_transformer_config_from_args(args)


def flags(arguments):
    """Megatron's flags: name, what each sets, its default, and whether it takes a value."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    return [
        {
            "name": action.option_strings[-1],
            "dest": action.dest,
            "default": action.default,
            "takes_value": action.nargs != 0,
            "const": action.const,
        }
        for action in parser._actions
        if action.option_strings
    ]


def main():
    # Whatever is printed on the way goes to stderr.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = _megatron()
    if sys.argv[1:] == ["--flags"]:
        json.dump(flags(arguments), answer, default=str)
    else:
        commands = json.load(sys.stdin)
        json.dump([verdict(arguments, command) for command in commands], answer)
    answer.close()


if __name__ == "__main__":
    main()
