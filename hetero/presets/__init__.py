"""Models that are known by name: files of Megatron's flags beside this one."""

from __future__ import annotations

from pathlib import Path

from hetero.errors import UserError

FOLDER = Path(__file__).parent


def model_file(name: str) -> Path:
    """The file of this name or else the preset's. Raises UserError, with the presets, for neither.

    A preset's name is matched without punctuation (`llama3.1-8b`) and with or without the minor
    version (`llama3-8b`).
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    presets = sorted(FOLDER.glob("*.yaml"))
    for file in presets:
        family, _, size = file.stem.partition("_")
        if _normalized(name) in (_normalized(file.stem), _normalized(family.split(".")[0] + size)):
            return file
    known = ", ".join(file.stem for file in presets)
    kind = "a folder, and no preset" if path.is_dir() else "neither a file nor a preset"
    raise UserError(f"{name} is {kind}; give a file of Megatron's flags or a preset: {known}")


def _normalized(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
