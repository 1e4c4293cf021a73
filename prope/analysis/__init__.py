"""What the heads of a decoder do: the parts of python -m prope.analyze."""
