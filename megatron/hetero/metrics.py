"""Metrics of a run: FLOPs, memory, the record of one iteration, where it is written, profiles.

docs/metrics.md explains the formulas.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.hetero.experts import layers_with_experts
from megatron.hetero.output_folders import FILES


def model_flops_per_token(args: argparse.Namespace, *, full_square: bool = False) -> float:
    """FLOPs of one forward and backward pass, per token.

    A multiply-add of a matrix product counts as two, the backward pass as twice the forward. Causal
    attention counts half of the score matrix, as in Megatron-LM's log; with `full_square` all of
    it. Recomputation is not counted.
    """
    hidden, layers, sequence = args.hidden_size, args.num_layers, args.seq_length
    projections, width = _attention_sizes(args)
    matrices = 3 if args.swiglu else 2
    mlp = matrices * hidden * args.ffn_hidden_size
    attention = width * (sequence if full_square else sequence / 2)
    head = hidden * args.padded_vocab_size
    predicting = args.mtp_num_layers or 0
    layers += predicting
    mlps = layers * mlp
    if args.num_experts is not None:
        mixing = len(layers_with_experts(args))
        widths = args.moe_router_topk * args.moe_ffn_hidden_size
        widths += args.moe_shared_expert_intermediate_size or 0
        mixture = hidden * (matrices * widths + args.num_experts)
        mlps = (layers - mixing) * mlp + mixing * mixture
    # Each MTP layer also joins two hidden states, and has logits of its own.
    joined = predicting * 2 * hidden * hidden
    heads = (1 + predicting) * head
    forward = 2 * (layers * (projections + attention) + mlps + joined + heads)
    return 3.0 * forward


def _attention_sizes(args: argparse.Namespace) -> tuple[int, int]:
    """(weights of a layer's projections, width of all heads' queries and values together)."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.multi_latent_attention:
        query, rank = args.qk_head_dim + args.qk_pos_emb_head_dim, args.q_lora_rank
        projections = hidden * heads * query if rank is None else rank * (hidden + heads * query)
        projections += hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
        projections += args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
        projections += heads * args.v_head_dim * hidden
        return projections, heads * (query + args.v_head_dim)
    queries = heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else heads
    return 2 * hidden * (queries + groups * args.kv_channels), 2 * queries


def tflops_per_gpu(
    args: argparse.Namespace, *, tokens: float, seconds: float, full_square: bool = False
) -> float:
    operations = model_flops_per_token(args, full_square=full_square) * tokens
    return operations / seconds / args.world_size / 1e12


def planned_state_bytes(parameters: int, *, args: argparse.Namespace, copies: int) -> int:
    """Expected bytes of weights, gradients and optimizer state of a rank, without activations.

    Adam keeps two fp32 moments, SGD one if it uses momentum, and reduced-precision weights have an
    fp32 copy. The distributed optimizer shards this state over the ranks with copies of a weight.
    """
    weight = 4 if args.params_dtype == "float32" else 2
    gradient = 4 if args.accumulate_allreduce_grads_in_fp32 else weight
    moments = 8 if args.optimizer == "adam" else (4 if args.sgd_momentum else 0)
    state = moments + (4 if weight == 2 else 0)
    shared = copies if args.use_distributed_optimizer else 1
    return parameters * (weight + gradient) + parameters * state // shared


def measured_peak_bytes(device: torch.device) -> int:
    """Peak memory so far: torch's allocator on a GPU, the resident set size on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_used_bytes(device: torch.device) -> int:
    """Memory in use on a GPU according to the driver, including other processes and libraries."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


@dataclass
class DataWaitTimes:
    """Seconds for which one rank was blocked on its data loader.

    The first iteration is separate: it includes starting the loader's workers.
    """

    first: float | None = None
    later: float = 0.0
    longest_later: float = 0.0
    """Maximum over iterations."""
    later_iterations: int = 0

    def add(self, seconds: float) -> None:
        """Add the wait of one iteration."""
        if self.first is None:
            self.first = seconds
            return
        self.later += seconds
        self.longest_later = max(self.longest_later, seconds)
        self.later_iterations += 1

    def as_json(self) -> dict[str, float]:
        return {
            "first_iteration_seconds": self.first or 0.0,
            "later_seconds": self.later,
            "longest_later_seconds": self.longest_later,
            "later_iterations": self.later_iterations,
        }


@dataclass(frozen=True)
class IterationRecord:
    """One line of `--metrics-file`."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    elapsed_ms: float
    tokens_per_s: float
    tflops_per_gpu: float
    tflops_per_gpu_full_square: float
    """With attention counted as a full square, as Megatron-LM's log did up to core 0.11."""
    loss: float
    grad_norm: float | None
    learning_rate: float
    weight_decay: float
    batch_size: int
    loss_scale: float
    skipped: bool
    num_zeros: float | None
    params_norm: float | None
    peak_memory_bytes: int
    """Rank 0's."""
    data_wait_ms: float
    """Time for which rank 0 was blocked on its data loader in this iteration."""
    link_bytes: int
    """Tensor bytes sent so far over links that cross a boundary, summed over all ranks."""
    goodput: float
    """Share of the job's wall time that went into steps which were kept, of 1."""
    simulated: bool
    more: Mapping[str, float] = field(default_factory=dict)
    """What parts of the model tell: losses beside that of the next token, without their
    coefficients and by Megatron's names, and the loads of experts."""

    def scalars(self) -> dict[str, float]:
        """What the live view shows of an iteration; values that are not finite are left out."""
        names = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "tflops_per_gpu")
        more = ("iteration", "loss_scale", "batch_size", "goodput")
        values = {name: getattr(self, name) for name in (*names, *more)} | self._more()
        return {
            name: float(value)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }

    def as_json(self) -> dict[str, Any]:
        """The record, with None for values that are not finite, which JSON cannot represent."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self._fields()
        }

    def _fields(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, value) for name, value in vars(self).items() if name != "more")
        yield from self._more().items()

    def _more(self) -> dict[str, float]:
        """In names without the spaces that some have in Megatron's log."""
        return {name.replace(" ", "_"): value for name, value in self.more.items()}


def check_outputs(args: argparse.Namespace, written: frozenset[str], *, is_rank_0: bool) -> None:
    """Raise UserError at startup for outputs of this rank that cannot be written.

    `written`: the flags whose file or folder it writes.
    """
    logs_to_wandb = is_rank_0 and args.wandb_project
    if logs_to_wandb:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise UserError(
                "--wandb-project needs wandb; install it with pip install '.[wandb]'"
            ) from error
    for name in FILES:
        if name not in written:
            continue
        flag, path = f"--{name.replace('_', '-')}", Path(getattr(args, name))
        try:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{flag} {path}: its folder cannot be made ({error.strerror}); name another file"
            ) from error
        _check_file(flag, path)
    if is_rank_0 and args.hetero_trace is not None:
        _check_folder("--hetero-trace", Path(args.hetero_trace))
    if "tensorboard_dir" in written:
        _check_folder("--tensorboard-dir", Path(args.tensorboard_dir))
    if logs_to_wandb and args.wandb_save_dir:
        # W&B silently falls back to another folder if this one is missing.
        _check_folder("--wandb-save-dir", Path(args.wandb_save_dir))


def _check_file(flag: str, path: Path) -> None:
    """Open the file for appending; removes it again if it did not exist."""
    existed = path.exists()
    if existed and not path.is_file():
        raise UserError(f"{flag} {path} cannot be written: it is no regular file; name another")
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{flag} {path} cannot be written ({error.strerror}); name another file"
        ) from error


def _check_folder(flag: str, folder: Path) -> None:
    """Create the folder and a temporary file in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag} {folder} cannot be made ({error.strerror}); name another folder"
        ) from error
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{flag} {folder} cannot be written to ({error.strerror}); name another folder"
        ) from error


def _truncate_after(path: Path, iteration: int) -> None:
    """Drop records after `iteration`, which a resumed run will write again."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["iteration"] <= iteration:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)


class _MetricsFile:
    """--metrics-file, in JSON lines. Methods raise OSError."""

    def __init__(self, path: Path, *, resumed_at: int) -> None:
        if resumed_at:
            _truncate_after(path, resumed_at)
        # Unbuffered, so that a crash loses no record.
        self._file = path.open("ab" if resumed_at else "wb", buffering=0)
        self._size = self._file.tell()

    def add(self, record: IterationRecord, more: dict[str, Any]) -> None:
        line = json.dumps(record.as_json() | more, allow_nan=False).encode() + b"\n"
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            # Remove the partial line that a full disk leaves.
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        self._file.close()


class _TensorBoardFile:
    """TensorBoard's event file. Its writer thread reports an OSError at a later call."""

    def __init__(self, args: argparse.Namespace, *, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._hook = threading.excepthook
        # The writer thread would print a traceback as well.
        threading.excepthook = self._ignore_os_errors
        self._writer = SummaryWriter(
            log_dir=args.tensorboard_dir,
            max_queue=args.tensorboard_queue_size,
            # Discard what a killed run logged after its last checkpoint.
            purge_step=resumed_at + 1 if resumed_at else None,
        )

    def _ignore_os_errors(self, failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__.startswith("tensorboard.") and isinstance(
            failure.exc_value, OSError
        ):
            return
        self._hook(failure)

    def add(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook


class MetricsLogger:
    """Writes metrics to --metrics-file, TensorBoard and Weights & Biases; `warn` gets warnings.

    Each is written by one rank: W&B by rank 0, a file or folder by the lowest rank that names it.
    An I/O error disables the output concerned with one warning; training continues.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        written: frozenset[str],
        logs_to_wandb: bool,
        resumed_at: int = 0,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`written`: the flags whose file or folder this rank writes."""
        self._interval = args.tensorboard_log_interval
        self._args = args
        self._warn = warn
        self._metrics: _MetricsFile | None = None
        self._events: _TensorBoardFile | None = None
        self._wandb: Any = None
        if "metrics_file" in written:
            with self._metrics_file_errors():
                self._metrics = _MetricsFile(Path(args.metrics_file), resumed_at=resumed_at)
        if "tensorboard_dir" in written:
            with self._tensorboard_errors():
                self._events = _TensorBoardFile(args, resumed_at=resumed_at)
        if logs_to_wandb and args.wandb_project:
            import wandb

            self._wandb = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name or None,
                entity=args.wandb_entity or None,
                dir=args.wandb_save_dir or None,
                config={k: v for k, v in vars(args).items() if not k.startswith("_")},
            )

    @contextlib.contextmanager
    def _metrics_file_errors(self) -> Iterator[None]:
        """Turn an OSError of the body into a warning, and disable the metrics file."""
        try:
            yield
        except OSError as error:
            failed, self._metrics = self._metrics, None
            self._warn_disabled(f"--metrics-file {self._args.metrics_file}", error, failed)

    @contextlib.contextmanager
    def _tensorboard_errors(self) -> Iterator[None]:
        """Turn an OSError of the body into a warning, and disable TensorBoard."""
        try:
            yield
        except OSError as error:
            failed, self._events = self._events, None
            self._warn_disabled(f"--tensorboard-dir {self._args.tensorboard_dir}", error, failed)

    def _warn_disabled(
        self, where: str, error: OSError, failed: _MetricsFile | _TensorBoardFile | None
    ) -> None:
        self._warn(
            f"warning: {where} can no longer be written ({error.strerror or error}); training goes "
            "on and writes nothing more there"
        )
        if failed is not None:
            # Closing may raise the same error again.
            with contextlib.suppress(OSError):
                failed.close()

    def iteration(self, record: IterationRecord, *, timing: dict[str, Any] | None = None) -> None:
        """Write the record of one iteration; `timing` is the interval's, in logged iterations."""
        if self._metrics is not None:
            with self._metrics_file_errors():
                self._metrics.add(record, {} if timing is None else {"timing": timing})
        if record.iteration % self._interval == 0:
            self._scalars(self._selected(record), step=record.iteration)

    def timers(self, seconds: dict[str, float], *, step: int) -> None:
        """Write timers, with --log-timers-to-tensorboard."""
        self._scalars(dict(seconds), step=step)

    def _selected(self, record: IterationRecord) -> dict[str, float | None]:
        """Scalars under Megatron's names: those always shown, and those that flags select."""
        values = {
            "lm loss": record.loss,
            "learning-rate": record.learning_rate,
            "grad-norm": record.grad_norm,
            "num-zeros": record.num_zeros,
            "params-norm": record.params_norm,
            "batch-size": record.batch_size,
            "iteration-time": record.elapsed_ms / 1000,
            "throughput": record.tflops_per_gpu,
            "tokens-per-second": record.tokens_per_s,
            "link-bytes": record.link_bytes,
            "goodput": record.goodput,
            **record.more,
        }
        if self._args.log_loss_scale_to_tensorboard:
            values["loss-scale"] = record.loss_scale
        if self._args.log_world_size_to_tensorboard:
            values["world-size"] = self._args.world_size
        if self._args.log_memory_to_tensorboard:
            values["mem-max-allocated-bytes"] = record.peak_memory_bytes
        return values

    def evaluation(self, name: str, *, loss: float, perplexity: float, iteration: int) -> None:
        values: dict[str, float | None] = {f"lm loss {name}": loss}
        if self._args.log_validation_ppl_to_tensorboard:
            values[f"lm loss {name} ppl"] = perplexity
        self._scalars(values, step=iteration)

    def _scalars(self, values: dict[str, float | None], *, step: int) -> None:
        present = {name: value for name, value in values.items() if value is not None}
        if self._events is not None:
            with self._tensorboard_errors():
                self._events.add(present, step=step)
        if self._wandb is not None:
            self._wandb.log(present, step=step)

    def close(self) -> None:
        if self._metrics is not None:
            with self._metrics_file_errors():
                self._metrics.close()
        if self._events is not None:
            with self._tensorboard_errors():
                self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


class StepProfiler:
    """--profile: profiles the steps from --profile-step-start up to --profile-step-end.

    Steps count as in Megatron: 10 to 12 profiles the two steps after the tenth. torch.profiler
    writes one trace per profiled rank to --tensorboard-dir; without --use-pytorch-profiler the
    range is marked for `nsys --capture-range=cudaProfilerApi`.
    """

    def __init__(self, args: argparse.Namespace, *, rank: int, device: torch.device) -> None:
        self._start, self._end = args.profile_step_start, args.profile_step_end
        self._enabled = args.profile and rank in args.profile_ranks
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._torch: Any = None
        if not self._enabled or not args.use_pytorch_profiler:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._torch = torch.profiler.profile(
            activities=activities,
            record_shapes=True,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                args.tensorboard_dir, worker_name=f"rank-{rank}"
            ),
        )

    def before_step(self, steps_done: int) -> None:
        if not self._enabled or steps_done != self._start:
            return
        self._running = True
        if self._torch is not None:
            self._torch.start()
        elif self._on_gpu:
            torch.cuda.profiler.start()

    def after_step(self, steps_done: int) -> None:
        if self._running and self._torch is not None:
            self._torch.step()
        if steps_done >= self._end:
            self.close()

    def close(self) -> None:
        """Stop and write the trace, if a profile is running."""
        if not self._running:
            return
        self._running = False
        if self._torch is not None:
            self._torch.stop()
        elif self._on_gpu:
            torch.cuda.profiler.stop()
