"""What bench/record_cost.py starts."""
