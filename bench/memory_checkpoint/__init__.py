"""What bench/memory_checkpoint_cost.py starts."""
