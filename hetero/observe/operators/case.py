"""What one operator of a run was given and has computed: recomputed in float64, judged, kept.

A case is a sample: of rows of tokens, and of attention some heads and queries with every key. It
can be written as a safetensors file, in which `inputs/`, `parameters/` and `outputs/` hold tensors
in the dtypes of the run, and the metadata entry `case` everything else as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hetero.errors import UserError
from hetero.observe.operators import formulas
from hetero.observe.operators.difference import Difference, difference
from hetero.observe.operators.sample import take
from hetero.observe.operators.tolerance import Rounding

FORMAT = 1
_BLOCK = 1 << 22
"""Elements of a weight that are float64 at a time."""
_COMPARED = 1 << 18
"""Elements of an output that are compared, at most about."""
_SAVED = 1 << 24
"""Elements of a weight that a file holds at most."""
_PARTS = ("inputs", "parameters", "outputs")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sample of one operator, on the device of the run."""

    operator: str
    kind: str
    rounding: Rounding
    settings: Mapping[str, Any]
    """Of the formula: what JSON has."""
    inputs: Tensors
    parameters: Tensors = field(default_factory=dict)
    outputs: Tensors
    where: Mapping[str, Any] = field(default_factory=dict)
    """Vendor, rank, host and iteration, for whoever reads the file."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One output of a case beside the float64 one."""

    tensor: str
    difference: Difference
    worst_column: int = 0
    """The column, of the last dimension, with the largest difference."""

    @property
    def share(self) -> float:
        """The error as a part of what is allowed."""
        return self.difference.error / self.difference.limits.error


def recompute(case: Case) -> tuple[Tensors, float]:
    """The outputs in float64, and by how much float32 errors inside grow with these inputs."""
    given = {
        name: tensor.double() for name, tensor in case.inputs.items() if tensor.is_floating_point()
    }
    settings = case.settings
    if case.kind == "linear":
        return {"output": _product(given["hidden"], case.parameters)}, 1.0
    used = _exact(case.parameters)
    if case.kind == "norm":
        return {
            "output": formulas.norm(
                given["hidden"],
                used["weight"],
                used.get("bias"),
                epsilon=settings["epsilon"],
                is_centred=settings["is_centred"],
                is_zero_centred=settings["is_zero_centred"],
            )
        }, 1.0
    if case.kind == "activation":
        hidden = given["hidden"] + used.get("bias", 0.0)
        return {"output": formulas.activation(hidden, settings["activation"])}, 1.0
    if case.kind == "residual":
        return {"output": given["residual"] + given["branch"] + used.get("bias", 0.0)}, 1.0
    if case.kind == "embedding":
        return {"output": given["rows"]}, 1.0
    if case.kind == "rotary":
        return _rotary(case, given), 1.0
    if case.kind == "attention":
        return _attention(case, given)
    if case.kind == "loss":
        loss = F.cross_entropy(given["logits"], case.parameters["labels"], reduction="none")
        # A loss is a difference of numbers as large as the logits.
        size = float(loss.square().mean().sqrt())
        reach = float(given["logits"].abs().amax(-1).square().mean().sqrt())
        return {"loss": loss}, max(1.0, reach / size) if size else 1.0
    raise ValueError(f"no formula for operators of kind {case.kind!r}")


def _exact(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}


def _product(hidden: torch.Tensor, parameters: Tensors) -> torch.Tensor:
    weight, bias = parameters["weight"], parameters.get("bias")
    rows = max(1, _BLOCK // weight.shape[1])
    parts = [F.linear(hidden, block.double()) for block in weight.split(rows)]
    output = torch.cat(parts, -1)
    return output if bias is None else output + bias.double()


def _rotary(case: Case, given: Tensors) -> Tensors:
    settings = case.settings
    query, key, value = formulas.split_heads(
        given["qkv"], groups=settings["groups"], width=settings["width"]
    )
    found = {"value": value}
    if "query" in given:
        found |= {"query before norm": query, "key before norm": key}
        query, key = given["query"], given["key"]
    if "angles" in given:
        angles, turned = given["angles"].unsqueeze(1), settings["is_interleaved"]
        query = formulas.rotate(query, angles, is_interleaved=turned)
        key = formulas.rotate(key, angles, is_interleaved=turned)
    return found | {"query": query, "key": key}


def _attention(case: Case, given: Tensors) -> tuple[Tensors, float]:
    positions = case.inputs["positions"]
    keys = torch.arange(given["key"].shape[0], device=positions.device)
    forbidden = keys[None, :] > positions[:, None]
    found, reach = [], 0.0
    for head in range(given["query"].shape[1]):
        scores = formulas.scores(
            given["query"][:, head], given["key"][:, head], scale=case.settings["scale"]
        )
        reach = max(reach, float(scores.masked_fill(forbidden, 0.0).abs().max()))
        found.append(formulas.attend(scores, given["value"][:, head], forbidden))
    # An error of a score, which grows with the score, is an error in an exponent.
    return {"output": torch.stack(found, 1)}, reach


def is_finite(case: Case) -> bool:
    """Whether everything that the operator was given is a number."""
    tensors = (*case.inputs.values(), *case.parameters.values())
    return all(_is_finite(tensor) for tensor in tensors if tensor.is_floating_point())


def _is_finite(tensor: torch.Tensor) -> bool:
    # torch.isfinite copies its argument, of which there may be no room for a second one: a weight
    # is here as a whole. A reduction has none, and both its results are nan if an element is.
    low, high = torch.aminmax(tensor)
    return math.isfinite(low) and math.isfinite(high)


def judge(case: Case) -> list[Verdict]:
    """Every output of a case beside float64, with the tolerances of `hetero compare-ops`."""
    exact, amplification = recompute(case)
    rounding = replace(case.rounding, amplification=max(case.rounding.amplification, amplification))
    found = []
    for name, output in case.outputs.items():
        reference = exact[name].reshape(output.shape)
        largest = torch.finfo(output.dtype).max
        if float(reference.abs().max()) > largest:
            continue  # an overflow, which a loss scale is there for
        compared = difference(
            take(output, count=_COMPARED), take(reference, count=_COMPARED), rounding=rounding
        )
        worst = 0
        if not compared.passed:
            apart = (output.double() - reference).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            worst = int(apart.flatten(0, -2).amax(0).argmax()) if output.dim() > 1 else 0
        found.append(Verdict(tensor=name, difference=compared, worst_column=worst))
    return found


def cut_to_file(case: Case, *, column: int) -> Case:
    """A case whose weight fits into a file: of a large one, some columns about `column`."""
    weight = case.parameters.get("weight")
    if case.kind != "linear" or weight is None or weight.numel() <= _SAVED:
        return case
    count = max(1, _SAVED // weight.shape[1])
    first = max(0, min(column - count // 2, weight.shape[0] - count))
    kept = {name: tensor[first : first + count] for name, tensor in case.parameters.items()}
    outputs = {name: tensor[..., first : first + count] for name, tensor in case.outputs.items()}
    settings = {**case.settings, "first_column": first}
    return replace(case, parameters=kept, outputs=outputs, settings=settings)


def write(case: Case, path: Path) -> None:
    """Write a case whole or not at all. Raises OSError."""
    tensors = {
        f"{part}/{name}": tensor.detach().cpu().contiguous()
        for part in _PARTS
        for name, tensor in getattr(case, part).items()
    }
    about = {
        "format": FORMAT,
        "operator": case.operator,
        "kind": case.kind,
        "rounding": asdict(case.rounding),
        "settings": dict(case.settings),
        "where": dict(case.where),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, path, {"case": json.dumps(about)})


def write_tensors(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
    """Write a file whole or not at all. Raises OSError."""
    temporary = path.with_name(path.name + ".partial")
    try:
        save_file(dict(tensors), temporary, metadata=metadata)
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(0, str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Case:
    """Read a case, on the CPU. Raises UserError for a file that is absent, damaged or none."""
    if not path.is_file():
        raise UserError(f"{path} is no file; check the path")
    try:
        with safe_open(path, framework="pt") as stored:
            about = json.loads((stored.metadata() or {}).get("case", "null"))
            if about is None:
                raise UserError(f"{path} is no case of --hetero-check-operators; name one")
            if about["format"] != FORMAT:
                raise UserError(f"{path} was written by another version of this project")
            parts: dict[str, Tensors] = {part: {} for part in _PARTS}
            for full in stored.keys():  # noqa: SIM118, it is no mapping
                part, _, name = full.partition("/")
                parts[part][name] = stored.get_tensor(full)
        return Case(
            operator=about["operator"],
            kind=about["kind"],
            rounding=Rounding(**about["rounding"]),
            settings=about["settings"],
            where=about["where"],
            **parts,
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged or another kind of file"
        raise UserError(f"{path} cannot be read ({reason})") from error


def again(case: Case, device: torch.device) -> Case | None:
    """The same with outputs that PyTorch's kernels compute on `device`; None if it has none."""
    here = {name: tensor.to(device) for name, tensor in case.inputs.items()}
    used = {name: tensor.to(device) for name, tensor in case.parameters.items()}
    settings = case.settings
    name = "output"
    if case.kind == "linear":
        result = F.linear(here["hidden"], used["weight"], used.get("bias"))
    elif case.kind == "norm" and not settings["is_zero_centred"]:
        hidden, weight = here["hidden"].to(used["weight"].dtype), used["weight"]
        if settings["is_centred"]:
            result = F.layer_norm(hidden, weight.shape, weight, used["bias"], settings["epsilon"])
        else:
            result = F.rms_norm(hidden, weight.shape, weight, settings["epsilon"])
    elif case.kind == "attention":
        query, key, value = (here[name].transpose(0, 1) for name in ("query", "key", "value"))
        keys = torch.arange(key.shape[1], device=device)
        allowed = keys[None, :] <= here["positions"][:, None]
        result = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=settings["scale"]
        ).transpose(0, 1)
    elif case.kind == "activation" and settings["activation"] == "swiglu":
        gate, up = (here["hidden"] + used.get("bias", 0.0)).to(here["hidden"].dtype).chunk(2, -1)
        result = F.silu(gate) * up
    elif case.kind == "activation" and "gelu" in settings["activation"]:
        hidden = here["hidden"] + used.get("bias", 0.0)
        how = "tanh" if settings["activation"].startswith("tanh") else "none"
        result = F.gelu(hidden, approximate=how)
    elif case.kind == "loss":
        name = "loss"
        result = F.cross_entropy(here["logits"].float(), used["labels"], reduction="none")
    else:
        return None
    return replace(case, inputs=here, parameters=used, outputs={name: result})
