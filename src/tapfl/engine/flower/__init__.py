"""Clients on other machines: the same server's loop and the same client's turn, over Flower."""
