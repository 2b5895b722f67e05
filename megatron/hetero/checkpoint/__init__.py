"""Checkpoints: what a run writes so that another, of any layout, goes on from it."""
