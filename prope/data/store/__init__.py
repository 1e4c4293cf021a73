"""Tokens on disk: built once from a source, read at random."""
