"""Meshes of different shapes, each plan beside one process: the plans, and what is compared."""
