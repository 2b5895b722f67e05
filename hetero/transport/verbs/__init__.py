"""Links over RDMA: each port of a NIC is a rail, driven by C through libibverbs."""
