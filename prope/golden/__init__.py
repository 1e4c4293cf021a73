"""Golden vectors of p-RoPE for ports to other languages, and the check of what a port computes."""
