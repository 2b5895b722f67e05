"""The same operators on two devices: what is kept of each, and whether the two agree.

`dump.py` is the file that one side writes and the other reads, `tolerance.py` how far honest
kernels may differ, `comparison.py` the verdict and `table.py` its text. Which operators there are
and how they are run is not known here; megatron.training.operators does that.
"""
