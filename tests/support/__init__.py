"""What tests of several files work with."""
