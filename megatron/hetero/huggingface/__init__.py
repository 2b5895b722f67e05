"""LLaMA 3.x and Qwen2 between Hugging Face's format and ours: names, tensors, flags, files."""
