"""``python -m tapfl``."""

from tapfl.cli import entry

entry()
