"""Pre-train a GPT, LLaMA or Qwen2 model, on one vendor's GPUs or across two.

    python -m hetero.run --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hetero-pipeline ...

Flags are Megatron-LM's; `--help` lists them.
"""

import sys

from hetero.megatron_imports import exit_if_other_megatron, exit_unless_installed

if __name__ == "__main__":
    exit_unless_installed("torch")
    exit_if_other_megatron()
    from megatron.hetero.pretrain import pretrain

    sys.exit(pretrain())
