"""Which ranks of a run are there, from the opening of the rendezvous store to the end."""
