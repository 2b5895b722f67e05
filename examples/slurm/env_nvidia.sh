# The environment of the NVIDIA side: a virtual environment with PyTorch for CUDA. Sourced on every
# NVIDIA node; edit it, or set ENV_NVIDIA to a script of your own (modules, containers, NIC settings).
#   VENV_NVIDIA   the virtual environment (.venv-cuda in the checkout)
: "${VENV_NVIDIA:=$ROOT/.venv-cuda}"
if [[ ! -f $VENV_NVIDIA/bin/activate ]]; then
    echo "error: $(hostname) has no virtual environment $VENV_NVIDIA; set VENV_NVIDIA or ENV_NVIDIA" >&2
    exit 2
fi
source "$VENV_NVIDIA/bin/activate"
