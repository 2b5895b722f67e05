"""Whether pretrain_gpt.py takes a plan beside the flags of the model's own file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hetero.errors import UserError
from hetero.presets import model_file
from megatron.hetero.arguments import read_command_line
from megatron.hetero.arguments.config_file import FLAG


def require_accepted(
    model: str, files: Mapping[str, str], *, ranks: int, model_yaml: str | None = None
) -> None:
    """Raise UserError with what pretrain_gpt.py would say of the written files on so many ranks.

    `files` are flags.yaml and plan.yaml, which need not be there yet, and `model_yaml` the text of
    the model's file if that is not there either. What is wrong without them
    too is no matter of the plan: flags that are still to be typed.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.yaml" if model_yaml is not None else model_file(model)
        if model_yaml is not None:
            file.write_text(model_yaml, "utf-8")
        own = [FLAG, str(file)]
        before = _refused(own, ranks=1)
        paths = {name: Path(folder) / name for name in files}
        for name, path in paths.items():
            path.write_text(files[name], "utf-8")
        words = [*own, FLAG, str(paths["flags.yaml"])]
        if plan := paths.get("plan.yaml"):
            words += ["--hetero-plan", str(plan)]
        said = [one.replace(f"{folder}/", "") for one in _refused(words, ranks=ranks)]
    if new := [one for one in said if one not in before]:
        raise UserError(
            *(
                f"pretrain_gpt.py would not take the plan that was found with the flags of "
                f"{model if model_yaml is not None else file}: {one}"
                for one in new
            )
        )


def _refused(words: Sequence[str], *, ranks: int) -> tuple[str, ...]:
    try:
        read_command_line(words, world_size=ranks)
    except UserError as error:
        return tuple(error.sentences)
    return ()
