"""Devices whose streams wait on memory, and the driver calls that PyTorch does not expose."""
