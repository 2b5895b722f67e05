"""Checks of nodes before a job: what they have, what they lack, and how they reach each other."""
