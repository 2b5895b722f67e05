"""A verbs link between devices whose streams order themselves, carried by a thread in C."""
