# The environment of the AMD side: a virtual environment with PyTorch for ROCm. Sourced on every
# AMD node; edit it, or set ENV_AMD to a script of your own (modules, containers, NIC settings).
#   VENV_AMD   the virtual environment (.venv-rocm in the checkout)
: "${VENV_AMD:=$ROOT/.venv-rocm}"
if [[ ! -f $VENV_AMD/bin/activate ]]; then
    echo "error: $(hostname) has no virtual environment $VENV_AMD; set VENV_AMD or ENV_AMD" >&2
    exit 2
fi
source "$VENV_AMD/bin/activate"
