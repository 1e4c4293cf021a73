"""The arrays of a batch, which windows of every kind have."""

import numpy as np

from prope.spec.data import DataSpec

Batch = dict[str, np.ndarray]
# tokens, targets: int32 [B, T].
# weights: float32 [B, T]; 0 where the target is a <bos>, padding or a token of a prompt.
# positions: int32 [B, T]; they restart at document borders if documents are masked.
# segment_ids: int32 [B, T], the number of the document within the window, from 1; 0 for padding.


class AnyWindows:
    """What all windows have; a mixture has several sources, others are their own."""

    def __init__(self, data: DataSpec, split: str):
        self.name = data.dataset
        self.split = split
        self.sources = [self]
        self.weights = [1.0]  # in windows
        self.shares = [1.0]  # of the predicted tokens
        self.seq_len = data.seq_len  # T
        self.position_range = data.position_range  # R; None: 0 .. T-1


def padding(rows: int, seq_len: int) -> Batch:
    """Returns windows without weights, to fill up a batch; the id of padding is 0."""
    shape = (rows, seq_len)
    names = ("tokens", "targets", "positions", "segment_ids")
    batch = {name: np.zeros(shape, np.int32) for name in names}
    return batch | {"weights": np.zeros(shape, np.float32)}
