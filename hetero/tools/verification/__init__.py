"""What `hetero verify` checks, step by step, and the report that it writes."""
