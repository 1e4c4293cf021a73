"""A run's directory: its config, its records, its checkpoints."""
