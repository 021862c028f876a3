"""The personal room: how a client makes its own model X from what it sees of W."""
