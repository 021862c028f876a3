"""The evaluation room: what a final model is worth on its tasks."""
