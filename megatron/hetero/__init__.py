"""From Megatron-LM's command line to a trained model, on megatron-core.

A regular package, so that it is the one imported where a checkout of Megatron-LM stands behind it
on the path. `megatron` itself stays a namespace, shared with megatron-core.
"""
