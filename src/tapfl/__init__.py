"""tapfl: personalised federated learning of multi-modal, multi-task foundation models."""

__version__ = "0.1.0"
