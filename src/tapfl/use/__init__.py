"""Using what a run has made: a client's models, their predictions, and what one takes away."""
