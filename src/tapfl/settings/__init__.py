"""The sections of a configuration: every key with its bounds, its default and its meaning."""
