"""Trains megatron-core's own GPT on four CPU ranks and checkpoints it as Megatron-LM does.

One process of several; `tests/distributed/test_megatron_checkpoints.py` starts them. Only what
Megatron-LM's training script adds around megatron-core is written here: the state dict that its
checkpointing makes, and the arguments in it. Nothing of this project but the CPU shim is used.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

from megatron.hetero.cpu_shim import cpu_shim

SEED = 1234


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with cpu_shim():
        _Run(plan).go()
    dist.destroy_process_group()


class _Run:
    """What a plan asks for: steps `first` to `last` with `args` on `batches`, and their `losses`.

    `load` is a checkpoint to begin from, `weights` a folder for the weights after that. `saves` are
    made before step `save_before`, or at the end.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.args = argparse.Namespace(**plan["args"])
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.args.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.args.pipeline_model_parallel_size,
            create_gloo_process_groups=False,
        )
        torch.manual_seed(SEED)
        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
        self.dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        self.config = self._config()
        self.model = self._build()
        self.optimizer, self.scheduler = self._build_optimizer()

    def go(self) -> None:
        plan = self.plan
        if plan.get("load"):
            self._load(Path(plan["load"]))
        batches = torch.load(plan["batches"], weights_only=True)
        losses = []
        for step in range(plan["first"], plan["last"] + 1):
            if step == plan.get("save_before"):
                for save in plan["saves"]:
                    self._save(Path(save["folder"]), step, save)
            if step == plan.get("weights_before"):
                self._dump(Path(plan["weights"]))
            if step < plan["last"]:
                losses.append(self._step(batches[step]))
        if dist.get_rank() == dist.get_world_size() - 1:
            Path(plan["losses"]).write_text(json.dumps(losses))

    def _config(self) -> Any:
        args = self.args
        return TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            normalization=args.normalization,
            gated_linear_unit=args.swiglu,
            activation_func=F.silu if args.swiglu else F.gelu,
            add_bias_linear=args.add_bias_linear,
            add_qkv_bias=args.add_qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            params_dtype=self.dtype,
            bf16=args.bf16,
            pipeline_dtype=self.dtype,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            batch_p2p_comm=False,
        )

    def _build(self) -> Any:
        args = self.args
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=args.use_distributed_optimizer,
            bucket_size=self.plan.get("bucket_size"),
        )
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
        )
        wrapped = Float16Module(self.config, model) if args.bf16 else model
        built = DistributedDataParallel(self.config, ddp, wrapped)
        built.broadcast_params()
        return built

    def _build_optimizer(self) -> tuple[Any, Any]:
        args = self.args
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=args.lr,
                min_lr=args.min_lr,
                weight_decay=args.weight_decay,
                adam_beta1=args.adam_beta1,
                adam_beta2=args.adam_beta2,
                clip_grad=args.clip_grad,
                bf16=args.bf16,
                params_dtype=self.dtype,
                use_distributed_optimizer=args.use_distributed_optimizer,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        length = args.train_iters * args.global_batch_size
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
            lr_decay_steps=length,
            lr_decay_style=args.lr_decay_style,
            start_wd=args.weight_decay,
            end_wd=args.weight_decay,
            wd_incr_steps=length,
            wd_incr_style="constant",
        )
        self.config.grad_scale_func = optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        return optimizer, scheduler

    def _step(self, batch: dict[str, torch.Tensor]) -> float:
        args = self.args
        replicas = parallel_state.get_data_parallel_world_size()
        mine = range(parallel_state.get_data_parallel_rank(), args.global_batch_size, replicas)
        samples = [(batch["tokens"][i : i + 1], batch["labels"][i : i + 1]) for i in mine]
        positions = torch.arange(args.seq_length)[None]

        def forward(iterator: Any, model: Any) -> Any:
            tokens, labels = next(iterator)
            losses = model(tokens, positions, None, labels=labels)

            def reduce(output: torch.Tensor) -> Any:
                loss = output.float().mean()
                return loss, {"loss": loss.detach().clone()}

            return losses, reduce

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(samples),
            model=self.model,
            num_microbatches=len(samples),
            seq_length=args.seq_length,
            micro_batch_size=1,
        )
        self.optimizer.step()
        self.scheduler.step(args.global_batch_size)
        losses = [record["loss"] for record in found if record]
        if not losses:
            return 0.0
        mean = torch.stack(losses).mean() / replicas
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        return float(mean)

    @property
    def _place(self) -> tuple[int, int]:
        """Pipeline stage and tensor-parallel rank."""
        return (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )

    @property
    def _rank_folder(self) -> str:
        stage, rank = self._place
        has_stages = self.args.pipeline_model_parallel_size > 1
        return f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if has_stages else "")

    def _bare(self) -> Any:
        model = self.model
        while hasattr(model, "module"):
            model = model.module
        return model

    def _dump(self, folder: Path) -> None:
        """This rank's parameters, to be compared bit by bit."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {name: value.detach().clone() for name, value in self._bare().named_parameters()}
        save_file(found, folder / f"rank{dist.get_rank()}.safetensors")

    def _save(self, save: Path, step: int, kind: dict[str, str]) -> None:
        """Megatron-LM's `save_checkpoint`: --ckpt-format torch_dist or torch."""
        self.args.iteration = step
        self.args.consumed_train_samples = step * self.args.global_batch_size
        folder = save / f"iter_{step:07d}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        state: dict[str, Any] = {
            "args": self._megatron_args(kind["format"]),
            "checkpoint_version": 3.0,
            "iteration": step,
            "num_floating_point_operations_so_far": 0,
        }
        if kind["format"] == "torch":
            self._save_legacy(folder, state)
        else:
            self._save_sharded(folder, state, kind["sharding"])
        dist.barrier()
        if dist.get_rank() == 0:
            (save / "latest_checkpointed_iteration.txt").write_text(str(step))

    def _save_legacy(self, folder: Path, state: dict[str, Any]) -> None:
        state["model"] = self._bare().state_dict_for_save_checkpoint()
        state["optimizer"] = {"optimizer": {"param_groups": []}}
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        state["rng_state"] = self._random_states()
        rank = self._rank_folder
        if parallel_state.get_data_parallel_rank() == 0:
            (folder / rank).mkdir()
            torch.save(state, folder / rank / "model_optim_rng.pt")

    def _metadata(self, sharding: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        if self.args.use_distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = sharding
            if sharding == "fully_reshardable":
                metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        metadata["singleton_local_shards"] = False
        metadata["chained_optim_avoid_prefix"] = True
        return metadata

    def _sharded(self, state: dict[str, Any], metadata: dict[str, Any], *, loading: bool) -> None:
        full = metadata | {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        state["model"] = self._bare().sharded_state_dict(metadata=full)
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=full
        )
        state["opt_param_scheduler"] = self.scheduler.state_dict()

    def _save_sharded(self, folder: Path, state: dict[str, Any], sharding: str) -> None:
        metadata = self._metadata(sharding)
        self._sharded(state, metadata, loading=False)
        state["rng_state"] = ShardedObject(
            "rng_state",
            self._random_states(),
            (self.args.pipeline_model_parallel_size, self.args.tensor_model_parallel_size),
            self._place,
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)

    def _random_states(self) -> list[dict[str, Any]]:
        return [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": numpy.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "cuda_rng_state": torch.get_rng_state(),
                "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
            }
        ]

    def _megatron_args(self, ckpt_format: str) -> argparse.Namespace:
        """The arguments with what Megatron-LM's own validation has put into them."""
        derived = {
            "attention_backend": AttnBackend.auto,
            "exit_signal": signal.SIGTERM,
            "model_type": ModelType.encoder_or_decoder,
            "params_dtype": self.dtype,
            "world_size": dist.get_world_size(),
            "data_parallel_size": parallel_state.get_data_parallel_world_size(),
            "rank": 0,
            "ckpt_format": ckpt_format,
            "num_experts": None,
            "multi_latent_attention": False,
            "fp8": None,
            "transformer_impl": "local",
        }
        return argparse.Namespace(**vars(self.args) | derived)

    def _load(self, load: Path) -> None:
        """Megatron-LM's `load_checkpoint` of either format."""
        step = (load / "latest_checkpointed_iteration.txt").read_text()
        folder = load / (step if step == "release" else f"iter_{int(step):07d}")
        if (folder / "metadata.json").exists():
            self._load_sharded(folder)
            return
        rank = self._rank_folder
        state = torch.load(folder / rank / "model_optim_rng.pt", weights_only=False)
        self._bare().load_state_dict(state["model"], strict=True)
        self.optimizer.reload_model_params()

    def _load_sharded(self, folder: Path) -> None:
        with torch.serialization.safe_globals([argparse.Namespace]):
            common = dist_checkpointing.load_common_state_dict(str(folder))
            metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
            adam_steps = self._prepare_optimizer(common)
            state: dict[str, Any] = {}
            self._sharded(state, metadata, loading=True)
            loaded = dist_checkpointing.load(state, str(folder))
        assert common["args"].num_layers == self.args.num_layers
        self._bare().load_state_dict(loaded["model"], strict=True)
        self.optimizer.load_state_dict(loaded["optimizer"])
        for part, step in zip(self.optimizer.chained_optimizers, adam_steps, strict=True):
            for kept in part.optimizer.state.values():
                kept["step"] = torch.tensor(float(step))
        self.scheduler.load_state_dict(loaded["opt_param_scheduler"])

    def _prepare_optimizer(self, common: dict[str, Any]) -> list[int]:
        """megatron-core 0.16.1 cannot resume torch's AdamW by itself: it needs its state to be
        there before, and loses the number of updates. Transformer Engine's needs neither."""
        steps = []
        for part in self.optimizer.chained_optimizers:
            inner = common["optimizer"].get("optimizer", common["optimizer"])
            steps.append(
                inner["param_groups"][0]["step"]
                if "step" in inner["param_groups"][0]
                else inner["state"]["common_step"]
            )
            if not self.args.use_distributed_optimizer:
                continue
            groups = part.optimizer.param_groups
            before = [(group["lr"], group["weight_decay"]) for group in groups]
            for group in groups:
                group["lr"] = group["weight_decay"] = 0.0
            part._init_optimizer_states_with_dummy_values()
            for group, (rate, decay) in zip(groups, before, strict=True):
                group["lr"], group["weight_decay"] = rate, decay
            part._set_main_param_and_optimizer_states = _keeping_steps(part)
        return steps


def _keeping_steps(part: Any) -> Any:
    original = part._set_main_param_and_optimizer_states

    def replaced(parameter: Any, tensors: dict[str, torch.Tensor]) -> Any:
        group, order = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][order]
        return original(parameter, {**tensors, "step": part.optimizer.state[main]["step"]})

    return replaced


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main()
