"""Differential privacy of a client's whole contribution: clipping, noise, and what it promises."""
