"""The report room: results for people."""
