"""One small runtime per kind of device, and what PyTorch does not offer of a GPU's driver."""
