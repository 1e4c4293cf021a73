"""Pages and pictures that open without a network."""
