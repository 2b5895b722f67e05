"""Reads Megatron-LM's pickles by torch's restricted loader, which runs nothing that they name.

A pickle names the functions that rebuild its objects, and a full unpickler calls them. torch's
loader calls those of tensors and refuses all others. Objects that Megatron-LM stores beside its
tensors become a `Placeholder`, which keeps their state: their class is never imported.
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
from megatron.hetero.checkpoint.index import DamagedCheckpoint

# Prefixes of classes that a placeholder may replace. Nothing is imported, so none can do harm.
_REPLACEABLE = (
    *("megatron.", "numpy.", "torch.distributed.", "transformer_engine."),
    *("transformer_engine_torch.", "apex.", "fp16.loss_scaler.", "pathlib.", "signal."),
    *("types.SimpleNamespace", "enum.", "_io.BytesIO", "io.BytesIO", "datetime."),
)
_MAX_CLASSES = 100
_REFUSED_NAME = re.compile(r"GLOBAL (\S+)")
"""In the message of torch's loader."""
_UNREADABLE = (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError)


class Placeholder:
    """An object of a class that is not imported: the arguments it was built from and its state."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Placeholder:
        placeholder = super().__new__(cls)
        placeholder.arguments, placeholder.state = arguments, None
        return placeholder

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class RestrictedLoader:
    """Reads the pickles of one checkpoint, and remembers the classes that become placeholders.

    Raises DamagedCheckpoint, and UserError naming a function or class that is not replaceable.
    """

    def __init__(self) -> None:
        self._replaced: set[str] = set()

    def load_file(self, path: Path) -> Any:
        """The object of a `torch.save` file, whose tensors are memory-mapped."""
        try:
            mapped = zipfile.is_zipfile(path)
            return self._load(path, source=str(path), mmap=mapped)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror or error})") from error

    def load_stream(self, stream: BinaryIO, *, source: str) -> Any:
        """The object of a `torch.save` stream, which must be seekable; errors name `source`."""
        return self._load(stream, source=source, mmap=False)

    def load_pickle(self, path: Path) -> Any:
        """The object of a `pickle.dump` file."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
        try:
            translated = _to_protocol_2(data)
        except (ValueError, IndexError, struct.error) as error:
            raise DamagedCheckpoint(f"{path} is damaged or no pickle ({error})") from error
        return self._load(_as_torch_file(translated), source=str(path), mmap=False)

    def _load(self, file: Path | BinaryIO, *, source: str, mmap: bool) -> Any:
        """Try until torch's loader refuses no name any more; each try lets one more through."""
        for _ in range(_MAX_CLASSES):
            placeholders = [(Placeholder, name) for name in sorted(self._replaced)]
            try:
                if not isinstance(file, Path):
                    file.seek(0)
                with _only_safe_globals([Namespace, *placeholders]):
                    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
            except pickle.UnpicklingError as error:
                self._replace_refused(str(error), source)
            except _UNREADABLE as error:
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                raise DamagedCheckpoint(f"{source} is damaged ({reason})") from error
        raise DamagedCheckpoint(f"{source} names more than {_MAX_CLASSES} classes")

    def _replace_refused(self, message: str, source: str) -> None:
        """Have a placeholder for the name that torch's loader refused, or raise an error."""
        match = _REFUSED_NAME.search(message)
        if match is None:
            reason = message.rpartition("WeightsUnpickler error: ")[2].strip().split("\n")[0]
            raise DamagedCheckpoint(f"{source} is damaged or no checkpoint ({reason})")
        name = match[1]
        if name in self._replaced or not name.startswith(_REPLACEABLE):
            raise UserError(
                f"{source} asks for {name} when it is read, which no checkpoint of a model needs; "
                "nothing of it was run, and it is not converted"
            )
        self._replaced.add(name)


@contextmanager
def _only_safe_globals(allowed: Sequence[Any]) -> Iterator[None]:
    """Allow torch's loader these classes alone, without those that megatron-core adds on import."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(list(allowed)):
            yield
    finally:
        torch.serialization.add_safe_globals(before)


def _as_torch_file(data: bytes) -> io.BytesIO:
    """Wrap a pickle into a `torch.save` file without tensors."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in (("data.pkl", data), ("version", b"3\n"), ("byteorder", b"little")):
            file.writestr(f"archive/{name}", content)
    return stream


def _to_protocol_2(data: bytes) -> bytes:
    """Translate a pickle to protocol 2, the only one that torch's restricted loader reads.

    Nothing is executed. Protocol 4 names a class by two strings on the stack (STACK_GLOBAL),
    protocol 2 by a line of text (GLOBAL). So strings are not memoized but repeated at each use.
    """
    operations = list(pickletools.genops(data))
    ends = [position for _, _, position in operations[1:]] + [len(data)]
    translated: list[tuple[str | None, bytes]] = []
    """Each operation's string, if it pushes one, and its encoding."""
    memoized_strings: dict[int, str] = {}
    memo_size = 0
    for (opcode, value, position), end in zip(operations, ends, strict=True):
        name, argument = opcode.name, cast(Any, value)
        if name in ("PROTO", "FRAME"):
            continue
        if name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            translated.append((argument, _binunicode(argument)))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            key = memo_size if name == "MEMOIZE" else argument
            memo_size += 1
            text = translated[-1][0]
            if text is None:
                translated.append((None, pickle.LONG_BINPUT + struct.pack("<I", key)))
            else:
                memoized_strings[key] = text
        elif name in ("BINGET", "LONG_BINGET"):
            text = memoized_strings.get(argument)
            get = pickle.LONG_BINGET + struct.pack("<I", argument)
            translated.append((text, get if text is None else _binunicode(text)))
        elif name == "STACK_GLOBAL":
            (attribute, _), (module, _) = translated.pop(), translated.pop()
            if module is None or attribute is None:
                raise ValueError(f"the name of a class at byte {position} is no text")
            translated.append((None, pickle.GLOBAL + f"{module}\n{attribute}\n".encode()))
        else:
            translated.append((None, data[position:end]))
    return pickle.PROTO + b"\x02" + b"".join(encoded for _, encoded in translated)


def _binunicode(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
