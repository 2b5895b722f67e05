#!/usr/bin/env python3
"""Stands for a launcher, a container or a tool of the machine while a script is captured.

Under a launcher's name it writes down the words for a training program; under a wrapper's name it
runs the command inside; under any other it does nothing. `capture.py` writes it under every name.
"""

import json
import os
import re
import sys

KEPT = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NVTE_CPU_OFFLOAD_V1")
KEPT += ("PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER")
LAUNCHERS = ("python", "python3", "torchrun", "ft_launcher", "deepspeed", "accelerate")
SHELLS = ("bash", "sh", "env")
PROGRAM = re.compile(r"(^|/)(pretrain|train|run_pretrain|run_mcore|main_pretrain)[\w.-]*\.py$")


def main():
    name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    if name in LAUNCHERS:
        launch(words)
    elif name == "scontrol" and "hostnames" in words:
        for node in range(int(os.environ.get("SLURM_NNODES", "1"))):
            print(f"node{node}")
    elif name == "yq":
        answer_yq(words)
    elif name in ("nvidia-smi", "rocm-smi", "amd-smi"):
        for gpu in range(8):
            print(f"GPU {gpu}: device")
    else:
        run_inside(words)


def launch(words):
    for place, word in enumerate(words):
        if PROGRAM.search(word):
            record(words[:place], word, words[place + 1 :])
            return
    if words[:1] == ["-c"] and "device_count" in words[1]:
        print(8)
    elif words[:1] in (["-c"], ["-"]) or not words:
        os.execv(os.environ["REAL_PYTHON"], [os.environ["REAL_PYTHON"], *words])


def record(launcher, program, words):
    content = {
        "program": program,
        "words": words,
        "world_size": world_size(launcher),
        "environment": {key: os.environ[key] for key in KEPT if key in os.environ},
    }
    with open(f"/records/{os.getpid()}.json", "w") as file:
        json.dump(content, file)


def world_size(launcher):
    options, words = {}, list(launcher)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            following = words[place + 1] if place + 1 < len(words) else ""
            options[name.lstrip("-").replace("-", "_")] = value if equals else following

    def number(names, default):
        for key in names:
            found = re.findall(r"\d+", options.get(key, ""))
            if found:
                return int(found[-1])
        return default

    per_node = number(("nproc_per_node", "num_gpus"), None)
    if per_node is not None:
        return per_node * number(("nnodes", "num_nodes"), 1)
    for key in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(key, "").isdigit():
            return int(os.environ[key])
    return 1


def answer_yq(words):
    """The questions that Megatron-LM's _run_training.sh asks about /stubs/model_config.json."""
    with open("/stubs/model_config.json") as file:
        config = json.load(file)
    question = words[0]
    if question.startswith("has("):
        print("false")
    elif ".ENV_VARS" in question:
        print("\n".join(f"{key}={value}" for key, value in config["ENV_VARS"].items()))
    elif "to_entries" in question:
        # A key without a value is left out, as by yq's select.
        lines = [f"{key}: {value}" for key, value in config["MODEL_ARGS"].items() if value != ""]
        print(os.path.expandvars("\n".join(lines)))
    elif ".LAUNCHER" in question:
        print("torchrun")
    else:
        print("null")


def run_inside(words):
    """The command after a wrapper's own options: the first word that is a program."""
    for place, word in enumerate(words):
        program = os.path.basename(word)
        if not program:
            continue
        known = program in LAUNCHERS or program in SHELLS or os.path.exists(f"/stubs/{program}")
        if known and not os.path.isdir(word):
            os.execvp(program, [program, *words[place + 1 :]])
        if os.path.isfile(word) and (os.access(word, os.X_OK) or word.endswith("sh")):
            os.execvp("bash", ["bash", *words[place:]])


main()
