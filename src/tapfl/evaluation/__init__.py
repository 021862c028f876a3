"""Evaluation: how good a final model is on its tasks."""
