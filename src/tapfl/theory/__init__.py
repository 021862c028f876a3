"""The convergence theorem as code: the bound, its constants, and a check by numbers."""
