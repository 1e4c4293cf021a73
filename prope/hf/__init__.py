"""Checkpoints in the Hugging Face format: written, and read."""
