"""Pre-train a GPT, LLaMA or Qwen2 model, on one vendor's GPUs or across two.

    python pretrain_gpt.py --standalone --nproc-per-node 8 --num-layers 32 --hetero-pipeline ...

It is `hetero pretrain`, for launchers and scripts that start a file. Flags are Megatron-LM's;
`--help` lists them. Flags of the launcher in front of them start the processes.
"""

import sys

from hetero.cli import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
