"""State in memory for scripts of torch.distributed: see `hetero.recover.state`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero.errors import HeteroError, UserError, print_line
from hetero.recover.generations import Generations, copied_nodes, state_folder
from hetero.recover.node_state import (
    CHOSEN_VARIABLE,
    RESUME_VARIABLE,
    file_identity,
    mark_damaged,
)
from hetero.recover.stored_files import (
    BLOCK_BYTES,
    INDEX_FILE,
    SAVING,
    StoredFile,
    checksum_problem,
    files_of_index,
    folder_name,
    iterations,
)


class ScriptState:
    """Of one rank. Its methods are collective over the default process group.

    Without a launcher that keeps state (`hetero run --hetero-restarts N`) `load` finds nothing and
    `save` does nothing. Threads: one.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Collective, after `init_process_group`."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        folder = state_folder(environ)
        self._is_restart = bool(environ.get(RESUME_VARIABLE))
        self._chosen = environ.get(CHOSEN_VARIABLE, "")
        self._is_writer = environ.get("LOCAL_RANK", "0") == "0"
        self._generations: Generations | None = None
        if all(self._gather(folder is not None)):
            assert folder is not None
            self._generations = Generations(folder, copied_nodes(environ))
        self._was_read_back = False

    def load(self) -> tuple[int, Any] | None:
        """The newest state that all ranks have, after a restart: its step, and what was saved.

        Tensors are on the CPU. None at a job's first start, and where nothing had been kept yet.
        Raises HeteroError where there is state, and ranks have nothing whole in common.
        """
        generations = self._generations
        if generations is None or not self._is_restart:
            return None
        found = dict(self._sound(generations))
        common = set.intersection(*(set(each.items()) for each in self._gather(found)))
        step = max((step for step, _ in common), default=None)
        if step is None and self._chosen:
            raise HeteroError(
                f"the state of step {self._chosen}, from which the script has to resume, is not "
                "whole for all ranks; see what they and their launchers say, and start the job by "
                "hand to begin without it",
                known_to_all=True,
            )
        if self._is_writer:
            generations.begin_run(0 if step is None else step)
        self._gather(None)  # nothing is written before that
        if step is None:
            return None
        path = generations.path / folder_name(step) / self._file
        return step, torch.load(path, map_location="cpu", weights_only=True)

    def save(self, step: int, state: Any) -> bool:
        """Keep a state, in place of the oldest of two. Returns whether it was kept.

        It is left out while launchers still copy the one before to another node. Blocks until all
        ranks have written theirs.

        Args:
            step: larger than that of the last one.
            state: tensors, numbers, strings and dicts, lists and tuples of them, as `state_dict`
                returns; what `torch.load` reads with weights_only.

        Where it cannot be written, as there is no room, that is a warning, and what is kept stays.
        Raises UserError, on every rank, for other state.
        """
        generations = self._generations
        if generations is None:
            return False
        if any(self._gather(self._is_writer and generations.awaits_copies())):
            return False
        saving = generations.path / (folder_name(step) + SAVING)
        if self._is_writer:
            with suppress(OSError):  # ranks that do not find the folder tell
                generations.begin(step)
        self._gather(None)
        stored, problems = self._written(saving, state)
        if not problems:
            index = _index(step, stored)
            problems = self._committed(generations, saving, index)
        if problems:
            if self._is_writer:
                shutil.rmtree(saving, ignore_errors=True)
            if self._rank == 0:
                print_line(f"warning: the state of step {step} is not kept: {problems[0]}")
            return False
        if self._is_writer:
            generations.complete(step)
        return True

    @property
    def _file(self) -> str:
        return f"rank_{self._rank:05d}.pt"

    def _written(self, folder: Path, state: Any) -> tuple[list[StoredFile], list[str]]:
        """The files of all ranks, or what has failed. Raises UserError for state of other types."""
        stored, problem, is_input = None, "", False
        path = folder / self._file
        try:
            torch.save(state, path)
            if not self._was_read_back:
                is_input = True
                torch.load(path, map_location="cpu", weights_only=True)
                is_input, self._was_read_back = False, True
            stored = _stored(path)
        except Exception as error:  # also what pickle and torch raise for state of other types
            problem = self._failure(error)
        gathered = self._gather((stored, problem, is_input))
        if refused := [text for _, text, is_bad in gathered if text and is_bad]:
            raise UserError(*refused, known_to_all=True)
        return [one for one, _, _ in gathered], [text for _, text, _ in gathered if text]

    def _committed(self, generations: Generations, folder: Path, index: str) -> list[str]:
        problem = ""
        if self._is_writer:
            try:
                generations.commit(folder, index)
            except OSError as error:
                problem = self._failure(error)
        return [text for text in self._gather(problem) if text]

    def _failure(self, error: Exception) -> str:
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"rank {self._rank} on {socket.gethostname()} cannot keep its state: {reason}"

    def _sound(self, generations: Generations) -> dict[int, str]:
        """The steps of which this rank's file is here and undamaged, with their digests."""
        found = {}
        for step in iterations(generations.path):
            folder = generations.path / folder_name(step)
            with suppress(OSError, ValueError):
                index = files_of_index((folder / INDEX_FILE).read_text())
                if len(index.files) != self._world_size or self._file not in index.files:
                    continue
                problem = checksum_problem(folder / self._file, index.files[self._file])
                if problem is None:
                    found[step] = index.digest
                else:
                    if problem.is_damage:
                        mark_damaged(generations.path, file_identity(folder / self._file))
                    print_line(
                        f"warning: rank {self._rank} on {socket.gethostname()} does not use the "
                        f"state of step {step}: {problem}"
                    )
        return found

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._world_size
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone


def _stored(path: Path) -> StoredFile:
    blocks = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            blocks.append(zlib.crc32(block))
    return StoredFile(path.stat().st_size, tuple(blocks))


def _index(step: int, stored: Sequence[StoredFile]) -> str:
    files = {f"rank_{rank:05d}.pt": [one.size, list(one.blocks)] for rank, one in enumerate(stored)}
    body = {"step": step, "files": files}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "checkpoint": body})
