"""Data: who holds what, the data sets, and batches of them."""
