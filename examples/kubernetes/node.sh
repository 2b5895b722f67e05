#!/usr/bin/env bash
# What the container of an Indexed Job starts: this node's part of the run.
#
# Kubernetes sets JOB_COMPLETION_INDEX. FIRST_NODE is the number of nodes before those of this Job;
# the other variables are those of examples/MODEL/node.sh. Arguments go to pretrain_gpt.py.
set -euo pipefail

refuse() {
    echo "error: $*" >&2
    exit 2
}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -n ${JOB_COMPLETION_INDEX:-} ]] ||
    refuse "JOB_COMPLETION_INDEX is not set; start this from a Job with completionMode: Indexed"
[[ -f $HERE/../${MODEL:-}/node.sh ]] ||
    refuse "MODEL is '${MODEL:-}'; give a model's folder, llama3_8b or qwen2_7b"
exec bash "$HERE/../$MODEL/node.sh" "$((${FIRST_NODE:-0} + JOB_COMPLETION_INDEX))" "$@"
