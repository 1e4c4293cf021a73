"""Generated tasks with known answers: training windows of all of them, prompts of eight."""
