"""Pre-train a GPT, LLaMA or Qwen2 model, on one vendor's GPUs or across two.

    torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ... --hetero-pipeline ...

Flags are Megatron-LM's; `--help` lists them.
"""

import sys

from megatron.training.pretrain import pretrain

if __name__ == "__main__":
    sys.exit(pretrain())
