"""How bytes cross a link. Knows buffers and peers; knows nothing of pipelines or Megatron."""
