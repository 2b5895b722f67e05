"""Which ranks of a run are alive, from the opening of the rendezvous store to the end."""
