"""Brings up a job: rendezvous, exchanges between all ranks, process groups and links."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from hetero.collectives.backend import INSTEAD_OF_VARIABLE
from hetero.collectives.links import NICS_VARIABLE
from hetero.collectives.world import adopt
from hetero.data.slowdown import SLOWDOWN_VARIABLE, slowdown_factors
from hetero.device.choose_device import choose_device
from hetero.errors import (
    CorruptionError,
    ExchangeError,
    HeteroError,
    LinkError,
    UserError,
    print_error,
    print_line,
    stamped,
    write_error_file,
    write_name_file,
)
from hetero.link.nics import Nics, find_nics
from hetero.link.open import ChannelOptions
from hetero.observe.collect import Collector
from hetero.observe.flight_recorder import active_library_calls, flight_recorder
from hetero.observe.options import Endpoint, requested_endpoint, stall_warning_seconds
from hetero.observe.record import recorder
from hetero.observe.state import RunDescription
from hetero.observe.throttling import ThrottleWatch, reader_for
from hetero.observe.watch import StallWatch, serve_request
from hetero.pipeline.groups import CROSSING_BACKEND, build_groups, joins_meshes, open_world
from hetero.pipeline.links import LinkOptions, open_links
from hetero.plan import Coordinate, Plan
from hetero.startup.addresses import family_of
from hetero.startup.exchange import JobExchanges
from hetero.startup.identity import PLAN, RankIdentity, check_identities, identify, running_vendor
from hetero.startup.liveness import (
    Liveness,
    LivenessServer,
    LocalRanks,
    RankFailure,
    open_liveness,
)
from hetero.startup.process import is_launched
from megatron.hetero.arguments import Configuration
from megatron.hetero.arguments.batch import steps_of
from megatron.hetero.arguments.model import ENGINE, engine_is_installed
from megatron.hetero.arguments.parallel import SHORTHAND
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.arguments.plan import apply_mesh
from megatron.hetero.checkpoint.find_checkpoint import (
    FoundCheckpoint,
    NoCheckpoint,
    find_checkpoint,
)
from megatron.hetero.checkpoint.folder import check_save_folder
from megatron.hetero.checkpoint.lock import SaveLock
from megatron.hetero.checkpoint.save_folder import take_save_folder
from megatron.hetero.checkpoint.state_in_memory import require_state_folder
from megatron.hetero.core_private import disable_coalescing, register_groups
from megatron.hetero.data import Datasets, agree_on_datasets, agree_on_tokenizer
from megatron.hetero.job import Job
from megatron.hetero.metrics import check_outputs
from megatron.hetero.optimizer import RankStatistics
from megatron.hetero.output_folders import Outputs, agree_on_outputs
from megatron.hetero.rendezvous import (
    agree_on_addresses,
    environment_rank,
    open_store,
    store_endpoint,
)
from megatron.hetero.run_description import describe_run, surroundings
from megatron.hetero.telemetry import require_exporter

if TYPE_CHECKING:
    from hetero.observe.server import MetricsServer

# Flags that may differ between ranks: they do not change what is computed, and none may decide
# whether a rank takes part in a collective.
_LOCAL_FLAGS = frozenset(
    {"ignored_flags", "typed_flags", "taken_flags"}
    | {"lacks_transformer_engine"}
    | {"data_path", "data_cache_path", "tokenizer_model"}
    | {"data_args_path", "per_split_data_args_path"}
    | {"train_data_path", "valid_data_path", "test_data_path", "vocab_file", "merge_file"}
    | {"metrics_file", "hetero_report", "tensorboard_dir", "wandb_save_dir", "hetero_plan"}
    | {"hetero_stall_warning", "hetero_flight_recorder", "hetero_operator_cases"}
    | {"hetero_metrics_port", "hetero_metrics_address"}
    | {"num_workers", "hetero_nics"}
    # Each vendor may use kernels of its own.
    | {"transformer_impl", "attention_backend", "bias_swiglu_fusion"}
    | {"bias_dropout_fusion", "cross_entropy_loss_fusion"}
    | {"apply_rope_fusion", "gradient_accumulation_fusion"}
)
_OF_PLAN = frozenset(SHORTHAND)
"""Values that a plan file gives instead of flags."""


def check_host(args: argparse.Namespace, plan: Plan, rank: int) -> Plan:
    """Check that this process can run its part of the plan. Raises UserError.

    Returns the plan with the vendor that a homogeneous run turns out to be on.
    """
    slowdown_factors(os.environ.get(SLOWDOWN_VARIABLE, ""))
    if not _crosses_vendors(args):
        plan = replace(plan, meshes=(replace(plan.meshes[0], vendor=running_vendor()),))
    if args.distributed_backend == "gloo" and torch.cuda.is_available():
        require_links(args, plan)
    own = plan.meshes[plan.coordinate(rank).mesh].transformer_impl
    # If it is not installed, the flags have already been changed to local layers.
    if (own or args.transformer_impl) == ENGINE and (own is None or engine_is_installed()):
        try:
            import transformer_engine  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"TransformerEngine is installed and cannot be imported ({error}); install it with "
                "pip install '.[te]' or use --transformer-impl local"
            ) from error
    if args.otel_enabled:
        require_exporter()
    if args.hetero_nics:
        find_rails(args, own="")
    if args.hetero_memory_checkpoint_interval and not args.skip_train:
        require_state_folder()
    if rank == 0 and args.save is not None and not args.skip_train:
        check_save_folder(Path(args.save))
    return plan


def _crosses_vendors(args: argparse.Namespace) -> bool:
    return bool(args.hetero_pipeline or args.hetero_data_parallel)


def _rank_names(identities: list[RankIdentity], plan: Plan) -> dict[int, str]:
    """The name of each rank in messages, with its host and stage."""
    names = {}
    for who in identities:
        place = plan.coordinate(who.rank)
        replica = f", replica {place.data}" if plan.whole_replicas else ""
        names[who.rank] = f"rank {who.rank} on {who.host} (stage {place.stage}{replica})"
    return names


class Initializer:
    """Takes one rank from its command line to a Job. Reports errors on the right ranks.

    An error on any rank ends the initialization of all.
    """

    def __init__(
        self, local_ranks: LocalRanks, *, is_signalled: Callable[[], bool] = lambda: False
    ) -> None:
        """`is_signalled` returns whether a signal ends this rank already."""
        self._local_ranks, self._is_signalled = local_ranks, is_signalled
        self.rank, self.world_size, self.local_rank = 0, 1, 0
        self.name = "this rank"
        """As in 'rank 5 on b (stage 1, amd)', once that is known."""
        self._exchanges: JobExchanges  # since `initialize`
        self.liveness: Liveness | None = None
        self._collector: Collector | None = None
        self._watch: StallWatch | None = None
        self._throttle_watch: ThrottleWatch | None = None
        self._live_view: MetricsServer | None = None
        self._description = RunDescription(world_size=1)
        self._lock: SaveLock | None = None
        self._own_address = "127.0.0.1"
        self._is_exiting = False
        self.exit_code: int | None = None
        """Of this process, once the main thread reports a failure that ends it."""
        self._printed: str | None = None
        self.on_failure: Callable[[str], None] | None = None
        """Called once, with the cause, when the run fails on this rank; from any thread."""

    def initialize(
        self, configuration: Configuration | None, refused: UserError | None, *, printed: bool
    ) -> Job:
        """Collective over all ranks of the job.

        Args:
            configuration: flags and plan; None if the command line was refused.
            refused: why it was refused.
            printed: whether that error has already been printed.
        """
        self._printed = str(refused) if printed else None
        self.rank, self.world_size, self.local_rank = environment_rank()
        recorder().rank = self.rank
        self._description = RunDescription(world_size=self.world_size)
        if self.rank == 0:
            self._collector = Collector(recorder())
        args, plan, problem = None, None, refused
        if configuration is not None:
            args = configuration.args
            try:
                plan = check_host(args, configuration.plan, self.rank)
                self._open_live_view(args)
            except UserError as error:
                problem = error
        if problem is not None and self.world_size == 1:
            raise problem
        timeout = 60.0 * (args.distributed_timeout_minutes if args is not None else 10)
        store = open_store(self.rank, self.world_size, timeout, self._local_ranks)
        if self.world_size > 1:
            self.liveness = open_liveness(
                store,
                rank=self.rank,
                world_size=self.world_size,
                master=os.environ["MASTER_ADDR"],
                local_ranks=self._local_ranks,
            )
            self.liveness.on_failure(self._exit_on_remote_failure)
            self.liveness.share_record(self._record)
            self.liveness.on_request(partial(serve_request, rank=self.rank))
            flight_recorder().ask_all = partial(
                self.liveness.request, {"dump": True, "by": self.rank}
            )
        if self._collector is not None and isinstance(self.liveness, LivenessServer):
            self.liveness.on_record(self._collector.add)
            self.liveness.on_report(self._add_lost_rank)
        self._exchanges = JobExchanges(
            store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            liveness=self.liveness,
            endpoint=store_endpoint(),
        )
        identities, device = self._exchange_identities(args, plan, problem)
        if (read := reader_for(device)) is not None:
            self._throttle_watch = ThrottleWatch(recorder(), read)
        if args is None or plan is None:
            raise RuntimeError("the ranks agreed although this one's command line was refused")
        if joins_meshes(plan):
            apply_mesh(args, plan.meshes[plan.coordinate(self.rank).mesh])
        self._description = describe_run(args, plan, identities)
        self.name = surroundings(plan, identities).name(self.rank)
        write_name_file(self.rank, self.name)
        if self.liveness is not None:
            self.liveness.set_names(_rank_names(identities, plan))
            self._own_address = agree_on_addresses(self._exchanges, self.liveness)
        outputs = agree_on_outputs(
            args,
            self._exchanges.exchange,
            rank=self.rank,
            check=partial(check_outputs, is_rank_0=self.rank == 0),
        )
        self._lock = take_save_folder(args, self._exchanges.exchange, rank=self.rank)
        tokenizer = agree_on_tokenizer(args, self._exchanges, read_indexes=self.local_rank == 0)
        checkpoint = find_checkpoint(
            args, self._exchanges.exchange, rank=self.rank, world_size=self.world_size
        )
        begun = checkpoint.train_state
        if args.train_samples:
            # The steps before a resume may have had another batch.
            left = steps_of(args, consumed=begun.consumed_train_samples)
            args.train_iters = begun.iteration + left
        datasets = agree_on_datasets(
            args,
            plan,
            tokenizer,
            self._exchanges,
            begun=begun,
            rank=self.rank,
            local_rank=self.local_rank,
        )
        return self._connect(
            args, plan, identities, device, datasets, checkpoint, outputs, store, timeout
        )

    def _open_live_view(self, args: argparse.Namespace) -> None:
        """On rank 0, where --hetero-metrics-port or else `hetero.run --metrics-port` asks for it.

        Raises UserError if it cannot listen there.
        """
        endpoint = (
            requested_endpoint(os.environ)
            if args.hetero_metrics_port is None
            else Endpoint(args.hetero_metrics_port, args.hetero_metrics_address or Endpoint.address)
        )
        if self._collector is None or endpoint is None:
            return
        # Not needed by runs without it.
        from hetero.observe.server import MetricsServer

        self._live_view = MetricsServer(
            self._collector,
            describe=lambda: self._description,
            address=endpoint.address,
            port=endpoint.port,
        )
        with contextlib.suppress(BrokenPipeError):
            print(stamped(f"live view: {self._live_view.url}"), flush=True)

    def _exchange_identities(
        self, args: argparse.Namespace | None, plan: Plan | None, problem: UserError | None
    ) -> tuple[list[RankIdentity], torch.device]:
        """Gather the identities of all ranks and check that they fit the plan and each other."""
        payload: dict[str, Any] = {}
        device = torch.device("cpu")
        if args is not None and plan is not None and problem is None:
            try:
                local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                device = choose_device(self.local_rank, local_size)
                flags = _compared_flags(args)
                flags[PLAN] = plan.to_mapping() if _crosses_vendors(args) else None
                payload = asdict(
                    identify(
                        rank=self.rank,
                        local_rank=self.local_rank,
                        planned_vendor=plan.vendor_of_rank(self.rank),
                        flags=flags,
                        typed=_spelled(args),
                    )
                )
            except UserError as error:
                problem = error
        payloads = self._exchanges.exchange(
            "command lines", payload=payload, error=problem, joining=True
        )
        identities = [RankIdentity(**record) for record in payloads]
        if args is None or plan is None:
            raise RuntimeError("the ranks agreed although this one's command line was refused")
        try:
            check_identities(identities, plan, mixed=_crosses_vendors(args))
        except UserError as error:
            # All ranks check the same identities and raise the same error.
            raise UserError(str(error), known_to_all=True) from error
        return identities, device

    def _record(self) -> bytes:
        """Liveness callback, once a second: this rank's record."""
        if self._throttle_watch is not None:
            self._throttle_watch.look()
        return recorder().snapshot().to_json()

    def _exit_on_remote_failure(self, error: HeteroError) -> None:
        """Liveness callback: exit because another rank ended. The main thread may be blocked."""
        if self.exit_code is None and not (self._is_exiting or self._is_signalled()):
            self.report(error)
            os._exit(error.exit_code)

    def _add_lost_rank(self, failure: RankFailure) -> None:
        """Liveness callback on rank 0."""
        who = f"rank {failure.rank} on {failure.host}"
        recorder().add_incident("rank lost", failure.sentence(who), lost=failure.rank)

    def end_failed(self, cause: str) -> None:
        """Call `on_failure` once."""
        handle, self.on_failure = self.on_failure, None
        if handle is not None:
            handle(cause)

    def close(self) -> None:
        """Release the lock on --save, end the live view. Call last, also after a failure."""
        if self._live_view is not None:
            self._live_view.close()
        if self._watch is not None:
            self._watch.close()
        if self._lock is not None:
            self._lock.release()

    def _connect(
        self,
        args: argparse.Namespace,
        plan: Plan,
        identities: list[RankIdentity],
        device: torch.device,
        datasets: Datasets,
        checkpoint: FoundCheckpoint | NoCheckpoint,
        outputs: Outputs,
        store: dist.Store,
        timeout: float,
    ) -> Job:
        set_determinism(args)
        vendor_backend, crossing_backend = group_backends(args, device)
        mixed = len(plan.meshes) > 1
        default = "gloo" if device.type == "cpu" else "cpu:gloo"
        if device.type == "cuda" and not mixed:
            default = f"cpu:gloo,cuda:{vendor_backend}"
        # hetero.collectives must not replace backends: they are chosen per group here.
        os.environ.pop(INSTEAD_OF_VARIABLE, None)
        if args.hetero_nics:
            os.environ[NICS_VARIABLE] = ",".join(args.hetero_nics)
        if self.liveness is not None:
            adopt(self.liveness, rank=self.rank, world_size=self.world_size)
        with self._exchanges.section("process groups", on_failure=self._exit_on_remote_failure):
            open_world(
                default,
                store=dist.PrefixStore("hetero/default", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout),
            )
            groups = build_groups(
                plan,
                self.rank,
                vendor_backend=vendor_backend,
                crossing_backend=crossing_backend,
                timeout=timedelta(seconds=timeout),
                crossing_timeout=timedelta(seconds=args.hetero_timeout),
            )
        register_groups(groups, plan, self.rank)
        if args.distributed_backend == "gloo":
            disable_coalescing()
        coordinate = plan.coordinate(self.rank)
        seed_everything(args, coordinate)
        names = {"name": uuid.uuid4().hex, "run": uuid.uuid4().hex} if self.rank == 0 else None
        agreed = self._exchanges.exchange("names of the job", payload=names)[0]
        secret = agreed["name"]
        links = None
        if args.hetero_pipeline:
            with self._exchanges.section("links", on_failure=self._exit_on_remote_failure):
                links = open_links(
                    plan,
                    self.rank,
                    LinkOptions(
                        boundary_transport=args.hetero_transport,
                        device=device,
                        store=dist.PrefixStore("hetero/links", store),
                        secret=secret,
                        timeout=args.hetero_timeout,
                        channel=channel_options(args, self._own_address),
                        vendor_backend=vendor_backend,
                        sequence=args.seq_length,
                        tensor_group=groups.tensor,
                        has_exited=self._has_exited,
                    ),
                )
        recorder().library_calls = active_library_calls
        if isinstance(self.liveness, LivenessServer) and self._collector is not None:
            self._watch = StallWatch(
                self._collector,
                self.liveness,
                surroundings=surroundings(plan, identities),
                warn_after=(
                    stall_warning_seconds(os.environ)
                    if args.hetero_stall_warning is None
                    else args.hetero_stall_warning
                ),
                tell=print_line,
            )
        if self.liveness is not None:
            longest = args.hetero_timeout if _crosses_vendors(args) else timeout
            self.liveness.set_heartbeat_timeout(min(longest, timeout))
        return Job(
            args=args,
            plan=plan,
            coordinate=coordinate,
            device=device,
            identities=identities,
            groups=groups,
            links=links,
            statistics=RankStatistics(groups.world, device),
            datasets=datasets,
            checkpoint=checkpoint,
            lock=self._lock,
            outputs=outputs,
            vendor_backend=vendor_backend,
            run_id=agreed["run"],
            liveness=self.liveness,
            collector=self._collector,
        )

    def remote_cause(self) -> str | None:
        """Which other rank has ended or hangs, as the likely cause of this rank's failure."""
        self._is_exiting = True
        return self.liveness.cause() if self.liveness is not None else None

    def _has_exited(self, rank: int) -> bool:
        return self.liveness is not None and rank in self.liveness.ended()

    def unresponsive_rank(self) -> str | None:
        """Which other rank does not respond, in a sentence, while none has ended."""
        if self.liveness is None or self.liveness.failure is not None:
            return None
        return self.liveness.cause(0)

    def report_signal(self, reason: str) -> None:
        """Tell the others, the launcher and the user that a signal ends this rank.

        Silent after a failure, of which the launcher's signal may be the consequence.
        """
        if self._is_exiting:
            return
        self._is_exiting = True
        consequence = self.liveness is not None and self.liveness.failure is not None
        printed = not (is_launched() or consequence)  # else by the launcher
        self.announce_failure(reason)
        if printed:
            print_error(reason if self.world_size == 1 else f"rank {self.rank}: {reason}")
        write_error_file(reason, printed=printed, consequence=consequence)
        self.end_failed(reason)
        self.close()

    def announce_failure(self, reason: str) -> None:
        """Tell all other ranks why this one ends, unless they know of an earlier failure."""
        if self.liveness is not None and self.liveness.failure is None:
            self.liveness.fail(reason)

    def report(self, error: HeteroError) -> None:
        """Print the error on the right ranks, and announce it to the others.

        An error known to all ranks is printed by one rank per node, because each node has a console
        of its own.
        """
        self._is_exiting = True
        if isinstance(error, LinkError):
            flight_recorder().dump_failure(str(error))
        else:
            flight_recorder().flush()
        words = self._watch.last_words() if self._watch is not None else ""
        if isinstance(error, LinkError) and words:
            error = LinkError(f"{error}; {words}", known_to_all=error.known_to_all)
        of_others = isinstance(error, ExchangeError) and error.exit_code != UserError.exit_code
        is_cut_off = isinstance(error, ExchangeError) and error.store_lost
        may_follow = isinstance(error, LinkError) or is_cut_off
        if may_follow and not error.known_to_all and (cause := self.remote_cause()) is not None:
            error = LinkError(f"{error}; {cause}")
        if not error.known_to_all and not of_others:
            self.announce_failure(str(error))
        is_logger = self.rank == 0 or self.local_rank == 0 or not error.known_to_all
        if is_logger:
            where = "" if self.world_size == 1 or error.known_to_all else f"rank {self.rank}: "
            if str(error) not in (self._printed, f"rank {self.rank}: {self._printed}"):
                print_error(f"{where}{error}")
        write_error_file(
            str(error),
            printed=is_logger,
            known_to_all=error.known_to_all,
            consequence=isinstance(error, LinkError) or of_others,
            corrupt=error.ranks if isinstance(error, CorruptionError) else (),
        )
        self.end_failed(str(error))
        if error.known_to_all and self.liveness is not None:
            # A rank that hangs never leaves.
            self.liveness.leave(seconds=3.0 if of_others else 10.0)


def _compared_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The values that all ranks must have in common; those of a plan file are in the plan."""
    local = _LOCAL_FLAGS | (_OF_PLAN if args.hetero_plan else frozenset())
    return {name: _as_json(value) for name, value in vars(args).items() if name not in local}


def _spelled(args: argparse.Namespace) -> dict[str, str]:
    """The flags that were typed, by the names of their values."""
    typed = set(args.typed_flags)
    return {
        action.dest: flag
        for action in build_parser()._actions
        for flag in action.option_strings
        if flag in typed
    }


def _as_json(value: Any) -> Any:
    """A flag's value after a round trip through JSON."""
    if isinstance(value, tuple):
        return [_as_json(item) for item in value]
    return value


def group_backends(args: argparse.Namespace, device: torch.device) -> tuple[str, str]:
    """The backend of groups inside a vendor, and that of groups that reduce across vendors."""
    if args.distributed_backend == "gloo":
        return "gloo", "gloo"
    return "nccl" if device.type == "cuda" else "gloo", CROSSING_BACKEND


def require_links(args: argparse.Namespace, plan: Plan) -> None:
    """Refuse a pipeline of GPUs without links: gloo cannot send GPU tensors point-to-point."""
    if plan.stages > 1 and not args.hetero_pipeline:
        raise UserError(
            "--distributed-backend gloo cannot join pipeline stages on GPUs of one vendor; give "
            "--hetero-pipeline with --hetero-transport gloo, or leave it out"
        )


def channel_options(args: argparse.Namespace, own: str) -> ChannelOptions:
    """Options of every link. `own` is the address through which other hosts reach this rank."""
    return ChannelOptions(
        ring_bytes=args.hetero_ring_mib << 20,
        chunk_bytes=args.hetero_chunk_kib << 10 if args.hetero_chunk_kib else None,
        checksum=args.hetero_checksum,
        connections=args.hetero_tcp_connections,
        nics=find_rails(args, own=own, family=family_of(own)),
    )


def find_rails(
    args: argparse.Namespace, *, own: str, family: socket.AddressFamily | None = None
) -> Nics:
    """Resolve --hetero-nics on this host. Raises UserError for an unknown device or interface."""
    try:
        return find_nics(args.hetero_nics or (), own=own, family=family)
    except ValueError as error:
        raise UserError(f"--hetero-nics on {socket.gethostname()}: {error}") from error


def set_determinism(args: argparse.Namespace) -> None:
    if args.deterministic_mode:
        # cuBLAS reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


_CONTEXT_SEED = 1_000_003
"""Keeps the seeds of context-parallel ranks away from those of stages and tensor-parallel ranks."""


def seed_everything(args: argparse.Namespace, coordinate: Coordinate) -> None:
    """Megatron's seeds: each pipeline stage its own, tensor-parallel ranks apart for dropout.

    Context-parallel ranks are apart as well: with Megatron's they would drop the same places of
    their rows.
    """
    seed = args.seed + 100 * coordinate.stage + _CONTEXT_SEED * coordinate.context
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, tp_rank=coordinate.tensor, ep_rank=0, etp_rank=0
    )
