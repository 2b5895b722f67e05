"""Collectives of a group whose ranks belong to several vendors, and the c10d backend over them."""
