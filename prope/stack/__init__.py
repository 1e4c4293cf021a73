"""The stack of layers: what layers differ in, and the loop over them."""
