"""From text to batches: documents -> tokens -> store -> windows, each a file that reads only the one before."""
