"""Real text that is on every machine which can train: Python's language reference, and source code.

Nothing is downloaded. The source code is that of Python's standard library and of PyTorch with two
packages that PyTorch brings along.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch", "sympy", "networkx")
SOURCES = f"Python's language reference and the source code of Python, {', '.join(PACKAGES)}"
LARGEST_FILE_BYTES = 256 * 1024
"""Larger files are tables that a program wrote."""
_NOT_PYTHONS_OWN = {"site-packages", "dist-packages"}


def language_reference() -> str:
    """Python's own language reference, as `help()` shows it: half a million letters of English."""
    return "\n\n".join(_topics())


def source_documents(characters: int) -> list[str]:
    """Documents of `characters` letters or a little more: less only where there are no more.

    The language reference comes first, and then source files of all packages in a mixed order that
    depends on nothing but their names, so that any number of letters is a fair sample.
    """
    documents, total = [], 0
    for document in _documents():
        if total >= characters:
            break
        documents.append(document)
        total += len(document)
    return documents


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return list(topics.values())


def _documents() -> Iterator[str]:
    yield from _topics()
    files = {f"{name}/{path.relative_to(root)}": path for name, root, path in _files()}
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = files[name].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            # Unreadable, or one of the standard library's tests of other encodings.
            continue
        if text.strip() and "\0" not in text:
            yield text


def _files() -> Iterator[tuple[str, Path, Path]]:
    """Name of the package, its folder, and a file below it."""
    for name, root in _folders():
        for path in root.rglob("*.py"):
            if name == "python" and _NOT_PYTHONS_OWN & set(path.relative_to(root).parts):
                continue
            if path.is_file() and path.stat().st_size <= LARGEST_FILE_BYTES:
                yield name, root, path


def _folders() -> Iterator[tuple[str, Path]]:
    yield "python", Path(sysconfig.get_path("stdlib"))
    for name in PACKAGES:
        # Looked up without importing: torch takes seconds.
        specification = importlib.util.find_spec(name)
        for folder in (specification and specification.submodule_search_locations) or ():
            yield name, Path(folder)
