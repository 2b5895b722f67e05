"""Pipeline parallelism over links, for megatron-core's schedules."""
