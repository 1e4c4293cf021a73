"""Where text comes from: each source yields UTF-8 documents in a fixed order."""
