"""Faults put into real training runs: what each does, and the run that it is put into."""
