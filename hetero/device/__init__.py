"""One small runtime per kind of device: copies on a side stream, marks, pinned host memory."""
