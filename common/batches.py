"""The order in which a training set is seen: the same for every framework."""

from __future__ import annotations

from typing import Iterator

import numpy as np


def shuffled(count: int, batch_size: int, epochs: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the indices of each training batch, int64 (batch_size,), full batches only.

    Of `count` examples, reshuffled every epoch, until `epochs` or `steps` are over. The order depends on `seed` alone.
    Raises `ValueError` where there aren't enough examples for one batch.
    """
    if batch_size > count:
        raise ValueError("a batch of {:,} needs more than the {:,} examples that there are".format(batch_size, count))
    random = np.random.RandomState(10_000 + seed)
    per_epoch = count // batch_size
    for step in range(min(steps, epochs * per_epoch)):
        position = step % per_epoch
        if position == 0:
            order = random.permutation(count)
        yield order[position * batch_size : (position + 1) * batch_size]
