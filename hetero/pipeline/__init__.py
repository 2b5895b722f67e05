"""The pipeline over the channel: links between stages, and megatron-core's p2p on top of them."""
