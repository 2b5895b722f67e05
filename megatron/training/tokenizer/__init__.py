"""The tokenizer of a run: megatron-core's, chosen by Megatron's flags, from local files only."""
