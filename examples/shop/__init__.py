"""A small shop: what a user of Turnmill writes, in two modules."""
