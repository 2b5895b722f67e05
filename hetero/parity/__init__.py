"""Comparison of runs and of operators between two sides."""
