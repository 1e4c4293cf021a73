"""What a run meets in the world: processes, signals, hangs, start-up, platforms, bad input."""
