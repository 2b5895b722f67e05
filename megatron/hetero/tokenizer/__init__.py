"""The run's tokenizer: megatron-core's, chosen by Megatron's flags, from local files only."""
