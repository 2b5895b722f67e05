"""The `verbs` transport: RDMA between registered buffers, driven by the CPU through pyverbs."""
