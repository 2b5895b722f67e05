"""An emulated NIC: plays the part of pyverbs that `hetero.transport.verbs` uses, for its tests.

Two processes, or two threads of one, are joined over Unix sockets; the bytes are put into the
registered memory by a thread of the process that owns it (memory of a CUDA device is reached by
staging through host memory). Completions, flushing, the capacity of every queue and the arming of
completion channels follow what verbs prescribe, and what does not is an error. Speed means nothing.

A device may hold what is written until it reads (`Device.holds_writes`), as the bus to a GPU may: a
transport that does not read back before it uses the bytes is then seen by wrong contents.
"""
