"""The channel between two GPUs of one host whose streams order themselves."""
