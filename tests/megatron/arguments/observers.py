"""What megatron-core, torch and W&B are given for a command line: where a flag shows that it acts.

Each function takes checked arguments and returns everything of one kind, as a mapping.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.tokenizers import MegatronTokenizer

from megatron.hetero import kernels, model
from megatron.hetero.arguments import Configuration
from megatron.hetero.data import (
    build_data_iterators,
    dataset_config,
    required_samples,
)
from megatron.hetero.fp8_operands import Recipe, Types
from megatron.hetero.initialize import channel_options, group_backends
from megatron.hetero.lr_schedule import LrSchedule
from megatron.hetero.optimizer import build_scheduler, optimizer_config
from megatron.hetero.tokenizer.build import build_tokenizer
from megatron.hetero.tokenizer.vocabulary import embedding_rows

Observer = Callable[[Configuration], dict[str, Any]]


def transformer(launch: Configuration) -> dict[str, Any]:
    """megatron-core's configuration on a GPU, where fusions exist."""
    args = launch.args
    config = model.transformer_config(args, launch.plan, torch.device("cuda"))
    found = {name: getattr(config, name) for name in config.__dataclass_fields__}
    found["activation at 2"] = float(config.activation_func(torch.tensor(2.0)))
    return found


def gpt(launch: Configuration) -> dict[str, Any]:
    """What the model is built with."""
    args = launch.args
    args.padded_vocab_size = embedding_rows(args, 100)
    plan = launch.plan
    with (
        mock.patch.object(model, "model_class") as chosen,
        mock.patch.object(model, "layer_spec"),
    ):
        model.build_chunk(
            args, None, plan=plan, coordinate=plan.coordinate(0), chunk=0, groups=None
        )
    return dict(chosen.return_value.call_args.kwargs)


def fused_kernels(launch: Configuration) -> dict[str, Any]:
    """The kernels of a run on a GPU, with liger-kernel installed."""
    args = launch.args
    with mock.patch.object(kernels, "has_liger_swiglu", return_value=True):
        return dataclasses.asdict(kernels.select_kernels(args, torch.device("cuda")))


def recipe(launch: Configuration) -> dict[str, Any]:
    """How matrices are cast to fp8 on an NVIDIA GPU."""
    found = Recipe.of(launch.args, Types.of(torch.device("cpu"), "nvidia"))
    return {} if found is None else dataclasses.asdict(found)


def ddp(launch: Configuration) -> dict[str, Any]:
    args = launch.args
    return dataclasses.asdict(model.ddp_config(args, parameters=1000))


def hooks(launch: Configuration) -> dict[str, Any]:
    """Which functions the schedules are told to call, for a rank with two model chunks."""
    args = launch.args
    config, chunks = SimpleNamespace(), [mock.Mock(), mock.Mock()]
    model._connect_gradient_hooks(args, config, chunks)  # type: ignore[arg-type]
    names = ("no_sync_func", "grad_sync_func", "param_sync_func")
    return {name: hasattr(config, name) for name in names}


def weights(launch: Configuration) -> dict[str, Any]:
    args = launch.args
    return dataclasses.asdict(model.initial_weights(args))


def optimizer(launch: Configuration) -> dict[str, Any]:
    args = launch.args
    return dataclasses.asdict(optimizer_config(args))


def schedule(launch: Configuration) -> dict[str, Any]:
    """The scheduler, and the rate and weight decay that it gives on the way."""
    args = launch.args
    group: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "wd_mult": 1.0, "lr_mult": 1.0}
    group |= {"max_lr": args.lr, "min_lr": args.min_lr}
    inner = SimpleNamespace(param_groups=[group])
    built = build_scheduler(LrSchedule.of_flags(args), SimpleNamespace(inner=inner))  # type: ignore[arg-type]
    found = dict(vars(built))
    rates, decays = [], []
    for _ in range(args.train_iters):
        built.step(increment=args.global_batch_size)
        rates.append(group["lr"])
        decays.append(group["weight_decay"])
    return found | {"rates": rates, "decays": decays}


def datasets(launch: Configuration) -> dict[str, Any]:
    args = launch.args
    config = dataset_config(args, tokenizer=SimpleNamespace(vocab_size=100))
    return dict(vars(config)) | dataclasses.asdict(required_samples(args))


def reordering(launch: Configuration) -> dict[str, Any]:
    """What is done to a sample before it becomes tokens and labels; nothing without --fim-data."""
    args = launch.args
    config = dataset_config(args, tokenizer=build_tokenizer(args))
    found = getattr(config, "transform", None)
    return {"done": found is not None} | (vars(found.__self__) if found else {})


def loader(launch: Configuration) -> dict[str, Any]:
    """How batches are drawn."""
    args = launch.args
    args.tokenizer_vocab_size = 100
    plan = launch.plan
    with mock.patch("torch.utils.data.DataLoader", return_value=[]) as built:
        (batches,) = build_data_iterators(
            args,
            list(range(64)),
            coordinate=plan.coordinate(0),
            plan=plan,
            consumed=0,
            device=torch.device("cpu"),
        )
        list(batches)
    options = built.call_args.kwargs
    return {**options, "first": next(iter(options["batch_sampler"]))}


def core_tokenizer(launch: Configuration) -> dict[str, Any]:
    """What megatron-core's tokenizer is made with; every library counts as installed."""
    args = launch.args
    core = mock.Mock(eod=0, pad=1, vocab_size=100)
    with (
        mock.patch.object(MegatronTokenizer, "from_pretrained", return_value=core) as made,
        mock.patch.object(importlib.util, "find_spec", return_value=object()),
    ):
        built = build_tokenizer(args)
    path, metadata = made.call_args.args
    identity, options = built._identity, made.call_args.kwargs
    if "eod_id" in options:  # from 0.18 on a NullTokenizer counts it in its size
        options = {**options, "vocab_size": options["vocab_size"] - 1}
    return {"path": path, **metadata, **options, **identity}


def channel(launch: Configuration) -> dict[str, Any]:
    args = launch.args
    with mock.patch.dict("os.environ", MASTER_ADDR="127.0.0.1"):
        return dataclasses.asdict(channel_options(args, "127.0.0.1"))


def backends(launch: Configuration) -> dict[str, Any]:
    """Of groups of GPUs."""
    args = launch.args
    inside, across = group_backends(args, torch.device("cuda"))
    return {"inside a vendor": inside, "across vendors": across}


def layout(launch: Configuration) -> dict[str, Any]:
    """Which ranks do what."""
    plan = launch.plan
    of_meshes = ("vendor", "tensor", "context", "data", "micro_batch_size", "recompute")
    return {
        "layers": plan.layers,
        "stages": plan.stages,
        "sizes": [mesh.stages for mesh in plan.meshes],
        **{name: [getattr(mesh, name) for mesh in plan.meshes] for name in of_meshes},
    }
