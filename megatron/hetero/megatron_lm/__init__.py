"""Megatron-LM's own checkpoints: reading them, and writing them."""
