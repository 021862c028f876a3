"""The experiments room: the paper's tables and ours, as plans of runs that are shared and kept."""
