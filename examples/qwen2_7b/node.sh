#!/usr/bin/env bash
# Qwen2 7B on nodes of two vendors, this script on each of them: NVIDIA first, then AMD.
#
#   node 0, NVIDIA:  MASTER_ADDR=node0 DATA_PATH=/data/tokens bash examples/qwen2_7b/node.sh 0
#   node 1, AMD:     MASTER_ADDR=node0 DATA_PATH=/data/tokens bash examples/qwen2_7b/node.sh 1
#
# Variables, beside those in examples/launch.sh:
#   MASTER_ADDR   address of node 0 that all nodes can reach
#   MASTER_PORT   a free port there (29500)
#   NODES         nodes of each mesh (1): "2 1" is two of the first and one of the second
#   GPUS          GPUs of a node (8), or of a node of each mesh ("8 4")
#   NICS          network interfaces or RDMA devices of this node (chosen by distance)
# --dry-run, among the further arguments, prints the command. All others go to pretrain_gpt.py.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/model.sh"
source "$HERE/../launch.sh"

read_arguments "${@:2}"
launch_on_a_node "${1:-}"
