"""Pre-train a GPT, LLaMA or Qwen2 model, on one vendor's GPUs or across two.

    python -m hetero.run --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hetero-pipeline ...

Flags are Megatron-LM's; `--help` lists them.
"""

import sys

from hetero.beside import leave_if_foreign, leave_unless_installed

if __name__ == "__main__":
    leave_unless_installed("torch")
    leave_if_foreign()
    from megatron.training.pretrain import pretrain

    sys.exit(pretrain())
