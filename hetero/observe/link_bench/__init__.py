"""Measures links between two processes of one host beside the bare limits of the same paths."""
