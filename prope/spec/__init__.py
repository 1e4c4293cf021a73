"""A run as typed values: made once from a config, checked when they are built."""
