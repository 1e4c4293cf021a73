"""Prompts with known answers that ask for what stands far back: eight tasks, each in two forms."""
