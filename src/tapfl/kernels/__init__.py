"""The kernel room: what the GPU does faster in one pass than torch does in several.

Written in Triton, which comes with torch on GPU machines. Every kernel has a plain version in the
model room, which the tests compare it with; without Triton the plain version runs.
"""
