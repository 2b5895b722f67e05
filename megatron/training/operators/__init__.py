"""Runs every operator of the model by itself and as part of the whole, and records the results.

`listing.py` says which operators there are, `draws.py` what they are given, `tape.py` what is
recorded, `hooks.py` cuts the real modules into operators, `reference.py` computes the same from
plain formulas in float64, and `session.py` makes a dump of either.
"""
