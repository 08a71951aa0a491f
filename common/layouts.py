"""Memory layouts of image batches."""

from __future__ import annotations

import numpy as np


def in_layout(images: np.ndarray, layout: str) -> np.ndarray:
    """Return NCHW images, contiguous, in `layout`. Raises `ValueError` for a layout that isn't known."""
    if layout == "NCHW":
        return np.ascontiguousarray(images)
    if layout == "NHWC":
        return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    raise ValueError("layout must be NCHW or NHWC, not {}".format(layout))
