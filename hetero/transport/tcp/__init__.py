"""Links between hosts over TCP: each connection is a rail, spread over the NICs that were named."""
