# LLaMA 3.1 8B in the published split. Sourced by the launch scripts.
PRESET=llama3.1_8b.yaml
# The output layer weighs about as much as 2.4 layers, so the last stage, AMD's, holds fewer.
: "${LAYERS:=17 15}"
