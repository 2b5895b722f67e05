"""The tools' own folder, and not the one of the same name in a checkout of Megatron-LM."""
