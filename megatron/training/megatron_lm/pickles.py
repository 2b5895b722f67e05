"""Megatron-LM's pickles, read by torch's restricted loader: nothing that they name is run.

A pickle names the functions that rebuild its objects, and a full unpickler calls them. torch's
loader calls those of tensors and refuses the rest. What Megatron-LM puts beside its tensors is let
through as a `Record`: the class is never imported, only what would have been its state is kept.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from hetero.errors import UserError
from megatron.training.checkpoint.index import DamagedCheckpoint

# Only ever stood in for, so that whoever wrote a name of these modules gains nothing by it.
_STOOD_IN = (
    *(
        "megatron.",
        "numpy.",
        "torch.distributed.",
        "transformer_engine.",
        "transformer_engine_torch.",
    ),
    *("apex.", "fp16.loss_scaler.", "pathlib.", "signal.", "types.SimpleNamespace"),
    *("enum.", "_io.BytesIO", "io.BytesIO", "datetime."),
)
_MOST_CLASSES = 100
_NAMED = re.compile(r"GLOBAL (\S+)")
_UNREADABLE = (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError)


class Record:
    """Stands for an object of a class that is not imported: what it was made of, and its state."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Record:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class RestrictedLoader:
    """Reads pickles of one checkpoint, remembering the classes that it stood in for."""

    def __init__(self) -> None:
        self._stood_in: set[str] = set()

    def file(self, path: Path) -> Any:
        """What `torch.save` wrote to a file; its tensors stay in the file until they are used."""
        try:
            mapped = zipfile.is_zipfile(path)
            return self._load(path, what=str(path), mmap=mapped)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror or error})") from error

    def stream(self, stream: BinaryIO, *, what: str) -> Any:
        """What `torch.save` wrote into a stream, which must be one that can be rewound."""
        return self._load(stream, what=what, mmap=False)

    def plain(self, path: Path) -> Any:
        """What `pickle.dump` wrote to a file."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
        try:
            translated = _second_protocol(data)
        except (ValueError, IndexError, struct.error) as error:
            raise DamagedCheckpoint(f"{path} is damaged or no pickle ({error})") from error
        return self._load(_as_torch_file(translated), what=str(path), mmap=False)

    def _load(self, source: Path | BinaryIO, *, what: str, mmap: bool) -> Any:
        for _ in range(_MOST_CLASSES):
            names = [(Record, name) for name in sorted(self._stood_in)]
            try:
                if not isinstance(source, Path):
                    source.seek(0)
                with _allowed_only([Namespace, *names]):
                    return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
            except pickle.UnpicklingError as error:
                self._stand_in(str(error), what)
            except _UNREADABLE as error:
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                raise DamagedCheckpoint(f"{what} is damaged ({reason})") from error
        raise DamagedCheckpoint(f"{what} names more than {_MOST_CLASSES} classes")

    def _stand_in(self, problem: str, what: str) -> None:
        """Let the class through that torch refused, or refuse it by name."""
        found = _NAMED.search(problem)
        if found is None:
            reason = problem.rpartition("WeightsUnpickler error: ")[2].strip().split("\n")[0]
            raise DamagedCheckpoint(f"{what} is damaged or no checkpoint ({reason})")
        name = found[1]
        if name in self._stood_in or not name.startswith(_STOOD_IN):
            raise UserError(
                f"{what} asks for {name} when it is read, which no checkpoint of a model needs; "
                "nothing of it was run, and it is not converted"
            )
        self._stood_in.add(name)


@contextmanager
def _allowed_only(allowed: Sequence[Any]) -> Iterator[None]:
    """Let torch's loader make objects of these classes and of no others: not of those either that
    megatron-core allows for the whole process when it is imported."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(list(allowed)):
            yield
    finally:
        torch.serialization.add_safe_globals(before)


def _as_torch_file(data: bytes) -> io.BytesIO:
    """A pickle as the only content of a file of `torch.save`, which torch's loader reads."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in (("data.pkl", data), ("version", b"3\n"), ("byteorder", b"little")):
            file.writestr(f"archive/{name}", content)
    return stream


def _second_protocol(data: bytes) -> bytes:
    """The same pickle in protocol 2, the only one that torch's restricted loader knows.

    Nothing is executed. Protocol 4 names a class by two strings on the stack, protocol 2 by a
    line, so strings are written out wherever they are used instead of being remembered.
    """
    found = list(pickletools.genops(data))
    ends = [position for _, _, position in found[1:]] + [len(data)]
    operations: list[tuple[str | None, bytes]] = []
    strings: dict[int, str] = {}
    remembered = 0
    for (code, value, position), end in zip(found, ends, strict=True):
        name, argument = code.name, cast(Any, value)
        if name in ("PROTO", "FRAME"):
            continue
        if name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            operations.append((argument, _string(argument)))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            place = remembered if name == "MEMOIZE" else argument
            remembered += 1
            text = operations[-1][0]
            if text is None:
                operations.append((None, pickle.LONG_BINPUT + struct.pack("<I", place)))
            else:
                strings[place] = text
        elif name in ("BINGET", "LONG_BINGET"):
            text = strings.get(argument)
            again = pickle.LONG_BINGET + struct.pack("<I", argument)
            operations.append((text, again if text is None else _string(text)))
        elif name == "STACK_GLOBAL":
            (attribute, _), (module, _) = operations.pop(), operations.pop()
            if module is None or attribute is None:
                raise ValueError(f"the name of a class at byte {position} is no text")
            operations.append((None, pickle.GLOBAL + f"{module}\n{attribute}\n".encode()))
        else:
            operations.append((None, data[position:end]))
    return pickle.PROTO + b"\x02" + b"".join(encoded for _, encoded in operations)


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
