"""Takes Hugging Face's config.json for a file of Megatron's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hetero.errors import UserError
from hetero.presets import model_file
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.model_flags import MODEL_FLAGS, Kind, spellings
from megatron.hetero.huggingface.configuration import args_from_config, read_json

_CONFIG = "config.json"
_LONGEST = 4096
"""The samples' length where none is given: what a model can process may be far longer."""


def flags_of_config(name: str) -> str | None:
    """The flags of the model of a config.json, or of the folder with one, as a YAML file.

    None for another kind of name. Raises UserError for what has no flag.
    """
    path = Path(name)
    if (path / _CONFIG).is_file():
        path /= _CONFIG
    if path.suffix != ".json":
        if path.is_dir():
            try:
                model_file(name)  # a preset, whose name the folder happens to have
            except UserError:
                raise UserError(
                    f"the model {name} is a folder without {_CONFIG}; give one that has it, in "
                    "Hugging Face's format, a file of Megatron's flags, or a preset's name"
                ) from None
        return None
    args = args_from_config(read_json(path), source=str(path))
    flags: dict[str, Any] = {}
    for argument, spelling in spellings(build_parser()).items():
        # A run's own tokenizer comes with its own flags.
        if argument not in args or MODEL_FLAGS[argument].kind is Kind.TOKENIZER:
            continue
        value, option = args[argument], spelling.option.removeprefix("--")
        if spelling.const is None:
            if isinstance(value, list) and not spelling.takes_several:
                value = spelling.word(value)
            flags |= {} if value is None else {option: value}
        elif value == spelling.const:
            flags[option] = True
    # As Megatron pads it, so that tensor-parallel ranks can divide it.
    rows, multiple = args["padded_vocab_size"], args["make_vocab_size_divisible_by"]
    flags["padded-vocab-size"] = -(-rows // multiple) * multiple
    flags["seq-length"] = min(_LONGEST, args["max_position_embeddings"])
    comment = f"# The model of {' '.join(str(path).split())}; its samples have the length given.\n"
    return comment + yaml.safe_dump(flags, sort_keys=False)
