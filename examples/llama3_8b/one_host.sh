#!/usr/bin/env bash
# LLaMA 3.1 8B on one machine whose GPUs play both vendors (simulated).
#
#   DATA_PATH=/data/tokens GPUS=8 bash examples/llama3_8b/one_host.sh [--dry-run] [more flags]
#
# GPUS is a multiple of the ranks of one replica (2 where left out). examples/launch.sh lists all other
# variables. --dry-run prints the command and looks neither for data nor for GPUs. More flags go to
# pretrain_gpt.py and win over the script's.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/model.sh"
source "$HERE/../launch.sh"

read_arguments "$@"
launch_on_one_host
