"""From text to batches: documents -> tokens -> store -> windows; each reads only the one before."""
