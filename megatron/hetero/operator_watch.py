"""--hetero-check-operators: operators of a run, compared with float64 every so many iterations.

In a checked iteration one replica of each mesh keeps, of the first micro-batch, a sample of what
the operators of one layer of each stage were given and have computed, with those at the ends of the
model. After the backward passes and before the update it is recomputed. Nothing of the training is
changed: no tensor, no random number, no message but a few numbers for the log.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from hetero.observe.operators import operator_list
from hetero.observe.operators.case import (
    Case,
    Verdict,
    cut_to_file,
    is_finite,
    judge,
    write,
)
from hetero.observe.operators.difference import hint
from hetero.observe.record import Phase, recorder
from hetero.text import counted
from megatron.hetero.arguments.flags_hetero import CASES
from megatron.hetero.console import Console
from megatron.hetero.first_pass import FirstPass
from megatron.hetero.job import Job
from megatron.hetero.model import StageModel
from megatron.hetero.operator_errors import OperatorErrors, summary
from megatron.hetero.operator_hooks import chunk_hooks
from megatron.hetero.rows_tape import RowsTape

_FILES = 16
"""Cases that a rank writes at most."""


def left_out(args: argparse.Namespace, *, tensor: int) -> dict[str, str]:
    """The kinds and names of operators that cannot be compared, and why.

    `tensor`: the size of the tensor-parallel group.
    """
    found = {}
    if args.attention_dropout > 0.0:
        found["attention"] = "--attention-dropout"
    elif args.reset_attention_mask:
        found["attention"] = "--reset-attention-mask"
    elif args.context_parallel_size > 1:
        found["attention"] = "keys of other context-parallel ranks"
    if args.hidden_dropout > 0.0:
        found["residual"] = "--hidden-dropout"
    elif args.reordered_norm or args.residual_multiplier != 1.0:
        found["residual"] = "a norm or a factor in it"
    if args.qk_layernorm_across_heads:
        found["q_layernorm"] = found["k_layernorm"] = "--qk-layernorm-across-heads"
    if tensor > 1:
        found["loss"] = "a vocabulary split over tensor-parallel ranks"
        if args.group_query_attention and args.num_query_groups < tensor:
            found["rotary"] = "query groups that tensor-parallel ranks share"
    return found


class OperatorWatch:
    """One rank's side. Does nothing without --hetero-check-operators."""

    def __init__(self, job: Job, model: StageModel, console: Console) -> None:
        args, place = job.args, job.coordinate
        self._job, self._console = job, console
        self._every: int = args.hetero_check_operators
        self._folder = Path(args.hetero_operator_cases or CASES)
        self._tape: RowsTape | None = None
        self._errors = OperatorErrors()
        self._is_due = False
        self._kept: set[str] = set()
        """Operators, with their layer, that are incidents."""
        self._warned: set[str] = set()
        """Operators, of whatever layer, that the console has been told are wrong."""
        self._failed: set[str | None] = set()
        """And those that it has been told cannot be compared."""
        self._is_folder_told = False
        self._files = 0
        if not self._every:
            return
        self._chunks = [
            next(part for part in chunk.modules() if isinstance(part, GPTModel))
            for chunk in model.chunks
        ]
        self._layers = [
            (chunk, index, first + index)
            for chunk, (built, first) in enumerate(
                zip(self._chunks, model.first_layers, strict=True)
            )
            for index in range(len(built.decoder.layers))
        ]
        """Of every own layer: its chunk, its index there and in the model."""
        block = next(block for block in job.plan.blocks if job.rank in block.ranks)
        self._is_watching = place.data == block.replicas.start and place.context == 0
        size = job.plan.meshes[place.mesh].tensor
        self._tensor = (place.tensor, size)
        self._left_out = left_out(args, tensor=size)
        listed = operator_list.operators(args, layers=args.num_layers, repeats=0)
        self._operators = {operator.name: operator for operator in listed}
        self._describe()

    def _describe(self) -> None:
        largest = max(mesh.tensor for mesh in self._job.plan.meshes)
        reasons = left_out(self._job.args, tensor=largest)
        interval = counted(self._every, "iteration") if self._every > 1 else "iteration"
        missing = ", ".join(f"{name} ({why})" for name, why in reasons.items())
        self._console.line(
            f"operators: every {interval} the forward pass of one layer of each stage is compared "
            "with float64" + (f"; not compared: {missing}" if missing else "")
        )

    def during(self, iteration: int) -> AbstractContextManager[None]:
        """Around the passes of an iteration, counted from 1."""
        self._is_due = bool(self._every) and iteration % self._every == 0
        if not self._is_due or not self._is_watching:
            return nullcontext()
        return self._record(iteration // self._every - 1)

    @contextmanager
    def _record(self, number: int) -> Iterator[None]:
        tape = self._tape = RowsTape(
            self._job.args,
            self._operators,
            number=number,
            left_out=self._left_out,
            tensor=self._tensor,
        )
        chosen = self._layers[number % len(self._layers)] if self._layers else (-1, 0, 0)
        with ExitStack() as undo:
            for index, chunk in enumerate(self._chunks):
                layer, name = None, str
                if index == chosen[0]:
                    layer = chosen[1]
                    name = partial(operator_list.layer_operator, chosen[2])  # type: ignore[assignment]
                hooks = partial(chunk_hooks, chunk, tape, layer=layer, name=name, failed=tape.fail)
                FirstPass(chunk, hooks, failed=partial(self._tell_failed, None), undo=undo)
            yield

    def compare(self) -> None:
        """Recompute what was recorded. Call before the weights change."""
        tape, self._tape = self._tape, None
        if tape is None:
            return
        with recorder().during(Phase.OTHER), torch.no_grad():
            self._errors = OperatorErrors()
            for operator, error in tape.errors.items():
                self._tell_failed(operator, error)
            while tape.cases:
                case = tape.cases.pop(0)
                try:
                    self._judge(case)
                except Exception as error:  # whatever it is, training goes on
                    self._tell_failed(case.operator, error)

    def _judge(self, case: Case) -> None:
        if not is_finite(case):
            return
        verdicts = judge(case)
        for each in verdicts:
            self._errors.add(case.kind, each.difference)
        wrong = [each for each in verdicts if not each.difference.passed]
        if wrong:
            self._tell_wrong(case, max(wrong, key=_badness))

    def _tell_wrong(self, case: Case, verdict: Verdict) -> None:
        """Once for each operator of each layer, and on the console once for each operator."""
        if case.operator in self._kept:
            return
        self._kept.add(case.operator)
        layer, name = operator_list.split(case.operator)
        identity = self._job.identities[self._job.rank]
        iteration = recorder().iteration
        found = verdict.difference
        path = self._save(case, verdict, vendor=identity.vendor, iteration=iteration)
        told = (
            f"operator {_described(case.operator)} is wrong on {self._rank()} in iteration "
            f"{iteration}: {found.measured()}"
        )
        recorder().add_incident(
            "operator",
            told,
            operator=name,
            layer=layer,
            vendor=identity.vendor,
            error=found.error if math.isfinite(found.error) else None,
            allowed=found.limits.error,
            exceeded=found.excess.name.lower(),
            case=None if path is None else str(path),
        )
        if name not in self._warned:
            self._warned.add(name)
            looks = "" if found.problem else f"; {hint(found)}"
            where = f"; see: hetero compare-ops case {path}" if path else ""
            self._console.warning(f"warning: {told}{looks}{where}")

    def _tell_failed(self, operator: str | None, error: Exception) -> None:
        """Once for each operator; None: for all of a chunk.

        It is tried again in each check, as the reason may be a want of memory.
        """
        layer, name = (None, None) if operator is None else operator_list.split(operator)
        if name in self._failed:
            return
        self._failed.add(name)
        what = "no operator" if operator is None else f"operator {_described(operator)}"
        told = (
            f"{what} {'can' if operator is None else 'cannot'} be compared on {self._rank()} in "
            f"iteration {recorder().iteration} ({_reason(error)})"
        )
        recorder().add_incident("operator not compared", told, operator=name, layer=layer)
        others = "" if operator is None else ", others are compared"
        self._console.warning(
            f"warning: {told}; training goes on{others}, and the next check tries again"
        )

    def _rank(self) -> str:
        identity = self._job.identities[self._job.rank]
        vendor = f"{identity.vendor}, simulated" if identity.simulated else identity.vendor
        return f"rank {self._job.rank} ({vendor}, {identity.host})"

    def _save(self, case: Case, verdict: Verdict, *, vendor: str, iteration: int) -> Path | None:
        if self._files >= _FILES:
            return None
        self._files += 1
        identity = self._job.identities[self._job.rank]
        where = {
            "vendor": vendor,
            "simulated": identity.simulated,
            "device": identity.device,
            "torch": identity.torch_version,
            "rank": self._job.rank,
            "host": identity.host,
            "iteration": iteration,
            "tensor": verdict.tensor,
        }
        name = f"iteration_{iteration}_rank_{self._job.rank}_{case.operator}.safetensors"
        try:
            cut = cut_to_file(case, column=verdict.worst_column)
            write(Case(**{**vars(cut), "where": where}), self._folder / name)
        except Exception as error:  # the incident is to be kept, whatever becomes of the file
            if not self._is_folder_told:
                self._is_folder_told = True
                reason = getattr(error, "strerror", None) or _reason(error)
                self._console.warning(
                    f"warning: {self._rank()} cannot write {self._folder / name} ({reason}); name "
                    "another folder with --hetero-operator-cases"
                )
            return None
        return self._folder / name

    def tell(self, iteration: int) -> None:
        """Log the errors of each vendor's ranks. Collective in a checked iteration."""
        if not self._is_due:
            return
        self._is_due = False
        rows = self._job.statistics.gather(self._errors.numbers)
        self._errors = OperatorErrors()
        by_vendor: dict[str, list[Sequence[float]]] = {}
        for identity, row in zip(self._job.identities, rows, strict=True):
            vendor = f"{identity.vendor} (simulated)" if identity.simulated else identity.vendor
            by_vendor.setdefault(vendor, []).append(row)
        for vendor, own in by_vendor.items():
            if text := summary(own):
                self._console.line(f"operators of iteration {iteration}, {vendor}: {text}")


def _badness(verdict: Verdict) -> tuple[int, float]:
    share = verdict.share
    return verdict.difference.excess, math.inf if math.isnan(share) else share


def _reason(error: Exception) -> str:
    """In one line: those of vendors' libraries have many."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _described(operator: str) -> str:
    layer, name = operator_list.split(operator)
    return name if layer is None else f"{name} of layer {layer}"
