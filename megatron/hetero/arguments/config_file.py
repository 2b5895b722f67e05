"""--yaml-cfg: expands YAML files into flags.

The name of a preset stands for its file. A key is a flag's name without dashes (`num-layers` or
`num_layers`), or Megatron's destination (`add_bias_linear: false` is --disable-bias-linear). A
value is the flag's value: a list if it takes several, true or false if it takes none; null and
false leave the flag out. A later file overrides an earlier one, and the command line overrides all
files.

There are three forms: a mapping of flags, under headings or not (Megatron-LM's form); the same with
`extends:`, `bases:` or `includes:`, which name files to build on (Primus' model and trainer files);
and Primus' experiment, whose `modules: pre_trainer:` names a trainer's and a model's file, and
overrides them. `${NAME}` is an environment variable, `${NAME:default}` has a default.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hetero.errors import Faults, UserError
from hetero.presets import model_file
from hetero.yaml_file import load_yaml
from megatron.hetero.arguments.unknown import REPLACED, explain_unknown, feature_of, is_unsupported

# megatron-core's fields whose flags have other names.
RENAMED: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_param": "fp8_param_gather",
    "bias_activation_fusion": "bias_gelu_fusion",
    "delay_grad_reduce": "align_grad_reduce",
    "delay_param_gather": "align_param_gather",
    "barrier_with_L1_time": "barrier_with_level_1_timing",
    "enable_gloo_process_groups": "gloo_process_groups",
    "perform_initialization": "initialization",
    "deprecated_use_mcore_models": "use_mcore_models",
    "use_dist_ckpt_deprecated": "use_dist_ckpt",
    "dist_ckpt_format_deprecated": "dist_ckpt_format",
}

# The flag for each activation that Megatron-LM's files can name.
ACTIVATIONS: Mapping[str, str | None] = {
    "gelu": None,
    "swiglu": "--swiglu",
    "squaredrelu": "--squared-relu",
}


# Primus' tokenizer types that are a Hugging Face folder's.
TOKENIZER = "HuggingFaceTokenizer"
TOKENIZERS = frozenset(
    f"{model}Tokenizer"
    for model in "Llama3 Llama4 Mixtral DeepSeekV2 DeepSeekV3 DeepSeekV4 Lfm2 KimiK2".split()
)


@dataclass(frozen=True)
class Group:
    """Settings of one feature that are no flags."""

    name: str
    switches: frozenset[str] = frozenset()
    """Keys that turn it on. One that is on is refused, or logged with `note` if there is one."""
    others: frozenset[str] = frozenset()
    """Keys of details, which are accepted. One that ends in _ stands for all that begin with it."""
    note: str | None = None
    off_values: frozenset[object] = frozenset()
    """Values of a switch that do not turn it on, beside those of `is_nothing`."""

    def has_key(self, key: str) -> bool:
        return key in self.switches or any(
            key == name or (name.endswith("_") and key.startswith(name)) for name in self.others
        )

    def is_asked_for(self, key: str, value: Any) -> bool:
        """Whether this key turns the feature on."""
        if key not in self.switches or is_nothing(value):
            return False
        return isinstance(value, list) or value not in self.off_values


def is_nothing(value: Any) -> bool:
    """Whether a value means that an option is not used."""
    return value is None or value is False or value in (0, "", [], "null", "none")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GROUPS = (
    Group(
        "megatron-core's internals, which this program sets itself",
        _names(
            "init_method output_layer_init_method embedding_init_method timers params_dtype"
            " pipeline_dtype autocast_dtype enable_autocast finalize_model_grads_func"
            " grad_scale_func no_sync_func grad_sync_func param_sync_func variable_seq_lengths"
            " num_microbatches_with_partial_activation_checkpoints memory_efficient_layer_norm"
            " moe_token_dropping cpu_offloading cpu_offloading_num_layers _cpu_offloading_context"
            " gated_linear_unit"
        ),
        _names(
            "batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs cpu_offloading_weights"
            " cpu_offloading_activations cpu_offloading_double_ tp_comm_split_ tp_comm_atomic_"
            " tp_comm_bulk_ bert_binary_head original_max_position_embeddings muon_split_qkv"
            " muon_use_nesterov data_parallel_replicate_degree retro_verify_neighbor_count"
        ),
    ),
    Group(
        "Primus' kernels",
        _names(
            "enable_primus_turbo use_turbo_attention use_turbo_gemm use_turbo_grouped_gemm"
            " use_turbo_grouped_mlp use_turbo_rms_norm use_turbo_autotune use_turbo_deepep"
            " use_turbo_fused_act_with_probs moe_use_fused_router_with_aux_score"
            " turbo_sync_free_moe_stage use_turbo_parallel_linear"
            " use_turbo_token_dispatcher_fp8_alltoall use_turbo_permute_padding"
        ),
        _names("turbo_"),
        note="Primus' kernels are not used; this program's own compute the same",
    ),
    Group("Primus' FP8 attention", _names("enable_turbo_attention_float8")),
    Group(
        "Primus' sliding window and attention sinks",
        _names("use_sink_attention sink_sliding_window"),
        _names("sink_window_"),
    ),
    Group(
        "Primus' zero-bubble pipeline",
        _names("patch_zero_bubble"),
        _names(
            "zero_bubble_ enable_zero_bubble enable_zb_runtime enable_1f1b_v"
            " pre_communication_optimization enable_optimizer_post_validation"
            " enable_exactly_numeric_match allow_padding_num_layers profile_memory_iter"
            " interleave_group_size offload_chunk_num offload_time auto_offload_time"
            " offload_overlap_sr num_seq_splits cpu_offload debug_scheduler_table"
        ),
    ),
    Group(
        "Primus' pipeline schedules",
        _names("patch_primus_pipeline dump_pp_data"),
        _names("pp_algorithm communication_method offload offload_ops pp_max_mem pp_cost_"),
    ),
    Group("Primus' on-demand communication", _names("enable_odc use_odc"), _names("odc_")),
    Group(
        "Primus' changes of a model",
        _names(
            "final_logit_softcapping attn_logit_softcapping router_logit_softcapping"
            " lfm_layer_types recompute_layer_ids decoder_pipeline_manual_split_list"
            " use_deprecated_20241209_moe_layer disable_primus_topk_router"
        ),
        _names("conv_L_cache conv_bias moe_router_force_load_balancing_type"),
    ),
    Group("the models that are no GPT", _names("model_type"), off_values=frozenset({"gpt"})),
    Group(
        "continuing from --save by itself",
        _names("auto_continue_train"),
        note="give --load with the folder of --save to go on from it",
    ),
    Group(
        "Primus' own way of working",
        frozenset(),
        _names(
            "trainable sink_level file_sink_level stderr_sink_level disable_tensorboard"
            " disable_wandb disable_mlflow mlflow_ generate_tracelens_"
            " disable_compile_dependencies use_rocm_mem_info use_rocm_mem_info_"
            " disable_profiler_activity_cpu torch_profiler_ disable_last_saving"
            " no_fp8_weight_transpose_cache patch_moe_overlap pp_warmup dataloader_mp_context"
            " log_avg_ wall_clock_step_timer disable_delayed_scaling_patches"
        ),
    ),
)

# Settings of Primus that disable all keys with a prefix.
SWITCHED_OFF: Mapping[str, str] = {"disable_wandb": "wandb_", "disable_tensorboard": "tensorboard_"}
# Headings whose keys count only if the named one is set.
OPTIONAL_HEADINGS: Mapping[str, str] = {"torch_compile": "enable", "mock_dataset": "class"}


def group_of(key: str) -> Group | None:
    """The group of a key; None if it belongs to none."""
    return next((group for group in GROUPS if group.has_key(key)), None)


VARIABLE = re.compile(r"\$\{(\w+)(?::-?([^}]*))?\}")
BUILT_ON = ("extends", "bases", "includes")
TRAINER = "pre_trainer"
# Where a checkout of Primus keeps the files that an experiment names.
PRIMUS_FOLDERS = {
    "config": "primus/configs/modules/megatron",
    "model": "primus/configs/models/megatron",
}

Settings = dict[str, Any]


def read_settings(path: Path, including: tuple[Path, ...] = ()) -> Settings:
    """The settings of a file and of the files that it builds on, which its own override.

    Keys have underscores. `including` are the files that led to this one. Raises UserError.
    """
    if path.resolve() in including:
        raise UserError(f"{path} builds on itself; remove it from {' or '.join(BUILT_ON)}")
    content = _load(path)
    including = (*including, path.resolve())
    if "modules" in content:
        return _without_switched_off(_read_experiment(path, content["modules"], including))
    settings: Settings = {}
    for name in BUILT_ON:
        for base in _names_in(path, name, content.pop(name, None)):
            settings |= read_settings(_beside(path, base), including)
    settings |= _flatten(content)
    return _without_switched_off(settings) if len(including) == 1 else settings


def _load(path: Path) -> dict[Any, Any]:
    content = load_yaml(path, source=str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `flag: value` lines")
    return dict(_with_variables(content, path))


def _with_variables(value: Any, path: Path) -> Any:
    """Replace every `${...}` in a value, and parse the result as YAML."""
    if isinstance(value, dict):
        return {key: _with_variables(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_variables(inner, path) for inner in value]
    if not isinstance(value, str) or not VARIABLE.search(value):
        return value

    def look_up(match: re.Match[str]) -> str:
        replacement = os.environ.get(match[1], match[2])
        if replacement is None:
            raise UserError(
                f"{path}: the environment variable {match[1]} is not set; set it, or write "
                f"${{{match[1]}:value}} in the file"
            )
        return replacement

    try:
        return yaml.safe_load(VARIABLE.sub(look_up, value))
    except yaml.YAMLError:
        return VARIABLE.sub(look_up, value)


def _read_experiment(path: Path, modules: Any, including: tuple[Path, ...]) -> Settings:
    """Primus' experiment: the trainer's file, then the model's, then its overrides."""
    module = modules.get(TRAINER) if isinstance(modules, dict) else None
    if not isinstance(module, dict):
        raise UserError(f"{path}: modules must hold {TRAINER}, the only one this program offers")
    if module.get("framework", "megatron") != "megatron":
        raise UserError(
            f"{path}: framework {module['framework']} is not Megatron-LM's; give an experiment of "
            "framework megatron"
        )
    settings: Settings = {}
    for name, folder in PRIMUS_FOLDERS.items():
        if module.get(name) is not None:
            file = _named_file(path, name, str(module[name]), folder)
            settings |= read_settings(file, including)
    overrides = module.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise UserError(f"{path}: overrides must hold `flag: value` lines")
    return settings | _flatten(overrides)


def _named_file(path: Path, name: str, named: str, folder: str) -> Path:
    """The file that an experiment names: beside it, or in the checkout of Primus it is in."""
    candidates = [path.parent / named]
    candidates += [parent / folder / named for parent in path.resolve().parents]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"{path}: {name} {named} is found neither beside it nor under {folder} of a folder above; "
        "put it there"
    )


def _beside(path: Path, named: str) -> Path:
    """The file that `path` builds on, which must be in the same folder."""
    if not (path.parent / named).is_file():
        raise UserError(f"{path} builds on {named}, which is not beside it; put it there")
    return path.parent / named


def _names_in(path: Path, name: str, value: Any) -> list[str]:
    """The file names in the value of the key `name`."""
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise UserError(f"{path}: {name} must be the name of a file, or a list of them")
    return names


def _flatten(content: Mapping[Any, Any]) -> Settings:
    """Keys and values without headings. If a key is under two headings, the last one wins."""
    flat: Settings = {}
    for key, value in _entries(content):
        if value is not None or key not in flat:
            flat[key] = value
    return flat


def _entries(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if not isinstance(value, dict):
            yield name, value
        elif name not in OPTIONAL_HEADINGS:
            yield from _entries(value)
        elif not is_nothing(value.get(OPTIONAL_HEADINGS[name])):
            yield name, True


def _without_switched_off(settings: Settings) -> Settings:
    prefixes = tuple(p for switch, p in SWITCHED_OFF.items() if settings.get(switch) is True)
    return {k: v for k, v in settings.items() if not prefixes or not k.startswith(prefixes)}


FLAG = "--yaml-cfg"


@dataclass(frozen=True)
class Setting:
    """A key and its value, as words of a command line."""

    subject: str
    """The destination that it sets, or the flag or key if there is none."""
    words: tuple[str, ...] = ()
    note: str | None = None
    """A line for the log if the setting is not used."""


def expand_config_files(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """`words` with the flags of every --yaml-cfg FILE in front, and notes for the log.

    The notes are on settings that are not used. Raises UserError, with all errors in all files.
    """
    paths, rest = _split_paths(words)
    translator = _Translator(parser)
    merged: dict[str, Setting] = {}
    faults = Faults()
    for path in paths:
        merged |= _read_file(path, translator, faults)
    faults.refuse()
    expanded = [word for setting in merged.values() for word in setting.words]
    return expanded + rest, _notes(merged)


def _read_file(path: str, translator: _Translator, faults: Faults) -> dict[str, Setting]:
    """The settings of a file by their subjects."""
    own = Faults()
    found: dict[str, Setting] = {}
    for key, value in (own.read(lambda: read_settings(model_file(path))) or {}).items():
        setting = own.read(partial(translator.translate, key, value))
        # Null under one name of a flag does not override a value under another name.
        if setting is not None and (value is not None or setting.subject not in found):
            found[setting.subject] = setting
    faults.add(
        f"{FLAG} {text if text.startswith(path) else f'{path}: {text}'}" for text in own.sentences
    )
    return found


def _split_paths(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of --yaml-cfg, and the other words."""
    paths: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, path = word.partition("=")
        if name != FLAG:
            rest.append(word)
            continue
        if not equals:
            path = next(remaining, "")
        if not path.strip() or path.startswith("--"):
            raise UserError(f"{FLAG} lacks a value: expected one argument")
        paths.append(path)
    return paths, rest


def _notes(settings: Mapping[str, Setting]) -> list[str]:
    """A line for each distinct note, with all its keys."""
    keys: dict[str, list[str]] = {}
    for key, setting in settings.items():
        if setting.note:
            keys.setdefault(setting.note, []).append(key)
    return [f"{', '.join(names)}: {note}" for note, names in keys.items()]


class _Translator:
    """Translates the keys of files to flags of `parser`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._by_flag: dict[str, argparse.Action] = {}
        self._by_subject: dict[str, argparse.Action] = {}
        for action in parser._actions:
            self._by_subject.setdefault(action.dest, action)
            for name in action.option_strings:
                if name.startswith("--"):
                    self._by_flag[name[2:].replace("-", "_")] = action
        self._flags = sorted(name for a in parser._actions for name in a.option_strings)

    def translate(self, key: str, value: Any) -> Setting:
        """The flag and words for a key, in underscores, and its value. Raises UserError."""
        if key in (FLAG[2:].replace("-", "_"), "help"):
            if is_nothing(value):
                return Setting(key)
            raise UserError(f"{key.replace('_', '-')} cannot stand in the file")
        if key == "activation_func":
            return _activation(value)
        if key == "tokenizer_type" and value in TOKENIZERS:
            value = TOKENIZER
        name = RENAMED.get(key, key)
        if name in self._by_flag:
            action = self._by_flag[name]
            return Setting(action.dest, _words(key, value, action, on_value=True))
        if name in self._by_subject:
            action = self._by_subject[name]
            return Setting(action.dest, _words(key, value, action, on_value=action.const))
        if (group := group_of(name)) is not None:
            if group.is_asked_for(name, value):
                if group.note is None:
                    raise UserError(f"{key} is one of {group.name}; set it to null, or remove it")
                return Setting(key, note=group.note)
            return Setting(key)
        return self._unsupported(key, name, value)

    def _unsupported(self, key: str, name: str, value: Any) -> Setting:
        """A flag that this program does not have; the parser accepts or refuses its words."""
        flag, dashed = f"--{name.replace('_', '-')}", name.replace("_", "-")
        known, feature = is_unsupported(flag), feature_of(flag)
        if not known and feature is not None and (is_nothing(value) or feature.kind == "needs"):
            # A newer flag of a feature, which only the feature's switch turns on.
            return Setting(flag)
        if (known or flag in REPLACED) and (value is None or value is False or value == []):
            return Setting(flag)
        for opposite in (f"--no-{dashed}", f"--disable-{dashed}"):
            offered = opposite in self._flags
            if isinstance(value, bool) and (offered or is_unsupported(opposite)):
                action_name = opposite[2:].replace("-", "_")
                subject = self._by_flag[action_name].dest if offered else opposite
                return Setting(subject, () if value else (opposite,))
        if not known:
            raise UserError(explain_unknown(flag, self._flags))
        if value is True:
            return Setting(flag, (flag,))
        if isinstance(value, list):
            return Setting(flag, (flag, *map(str, value)))
        return Setting(flag, (f"{flag}={value}",))


def _activation(value: Any) -> Setting:
    if value is None:
        return Setting("activation_func")
    if value not in ACTIVATIONS:
        choices = ", ".join(ACTIVATIONS)
        raise UserError(f"activation_func cannot be {value!r}; choose from {choices}")
    flag = ACTIVATIONS[value]
    return Setting("activation_func", (flag,) if flag else ())


def _words(key: str, value: Any, action: argparse.Action, *, on_value: Any) -> tuple[str, ...]:
    """The words that set an action to the value of `key`.

    A flag without a value is given if the key's value is `on_value`. Raises UserError.
    """
    flag = action.option_strings[0]
    if value is None:
        return ()
    if action.nargs == 0:
        if value not in (True, False):
            raise UserError(f"{key} must be true or false, not {value!r}")
        return (flag,) if bool(value) == on_value else ()
    if value is False or value in ("", []):
        return ()
    if value is True:
        raise UserError(f"{key} takes a value, not true")
    if isinstance(value, list):
        if action.nargs is None:
            raise UserError(f"{key} takes one value, not a list")
        return (flag, *map(str, value))
    # A value may begin with a dash.
    return (f"{flag}={value}",) if action.nargs is None else (flag, *str(value).split())
