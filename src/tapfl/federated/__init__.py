"""The federated room: how the federated model W moves."""
