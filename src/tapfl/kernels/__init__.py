"""Kernels: what a GPU computes faster in one pass than torch does in several.

Written in Triton, which comes with torch on GPU machines. Every kernel has a plain torch version
in ``tapfl.model``, which the tests compare it with; without Triton the plain version runs.
"""
