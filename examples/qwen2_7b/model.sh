# Qwen2 7B in the published split. Sourced by the launch scripts.
PRESET=qwen2_7b.yaml
# The output layer weighs about as much as 2.3 layers, so the last stage, AMD's, holds fewer.
: "${LAYERS:=16 12}"
