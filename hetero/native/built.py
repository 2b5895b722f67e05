"""Libraries of our own in C: where the install has put one, and why it cannot be used."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hetero.errors import LinkError


@dataclass(frozen=True)
class BuiltLibrary:
    """A library that the install builds beside its sources, for ctypes."""

    name: str
    """What errors call it."""
    folder: Path
    stem: str
    """Of its file, before what Python adds for the platform."""
    version: int
    version_function: str
    functions: Mapping[str, tuple[object, list[object]]]
    """The type of the result and of the arguments of each."""
    packages: str
    """What building it needs; a part of the remedy."""
    at_run_time: str = ""
    """What using it needs; likewise."""

    def load(self, path: Path | None = None) -> ctypes.CDLL:
        """The library, with the types of its functions. Its calls release the GIL.

        Raises LinkError, with the remedy, where it is not built or cannot be used.
        """
        path = path or self._built()
        if path is None:
            raise LinkError(
                f"the {self.name} is not built; install {self.packages} and install this project "
                "again (pip install -e .)"
            )
        try:
            library = ctypes.CDLL(str(path), use_errno=True)
            version: int = getattr(library, self.version_function)()
            if version != self.version:
                raise LinkError(
                    f"the {self.name} is of version {version} and {self.version} is needed; "
                    "install this project again"
                )
            for name, (result, arguments) in self.functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise LinkError(
                f"the {self.name} cannot be loaded ({error}); install {self.at_run_time}this "
                "project again"
            ) from error
        return library

    def why_not(self) -> str | None:
        """Why this process cannot use the library; None if it can."""
        try:
            self.load()
        except LinkError as error:
            return str(error)
        return None

    def _built(self) -> Path | None:
        found = (self.folder / f"{self.stem}{suffix}" for suffix in EXTENSION_SUFFIXES)
        return next((path for path in found if path.exists()), None)
