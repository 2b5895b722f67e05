"""What bench/operator_watch_cost.py starts."""
