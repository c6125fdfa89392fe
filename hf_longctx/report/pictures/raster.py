"""Rectangles -> pixels, each of which is the mean of what it covers, so that 16,384 ranks may share 900 lines of pixels.

What a rectangle [u, v) covers of the unit cells along one axis rises from 0 to 1 at u and falls at v, and its differences
are four numbers: 1-frac(u) at cell floor(u), frac(u) in the next, and the same with a minus sign at v. The product of two
axes has 16. They are added up for all rectangles, and two running sums make pixels of them. Nothing is sent.

    [0.25, 2)   covers 0.75 1 0    differences  0.75 0.25 -1 0
"""

from __future__ import annotations

import numpy as np


def covered(rectangles: np.ndarray, weights: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """float64 [rows, columns, channels]: of each pixel, the sum of the rectangles' weights times the share that each covers.

    Args:
        rectangles: [n, 4] top, bottom, left, right in pixels, within the picture.
        weights: [n, channels].
    """
    down = _differences(rectangles[:, 0], rectangles[:, 1])
    right = _differences(rectangles[:, 2], rectangles[:, 3])
    shape = (rows + 2, columns + 2)
    channels = np.zeros((weights.shape[1], shape[0] * shape[1]))
    for line, down_weight in down:
        for column, right_weight in right:
            cell, weight = line * shape[1] + column, down_weight * right_weight
            for channel, of_rectangle in zip(channels, weights.T):
                channel += np.bincount(cell, weight * of_rectangle, len(channel))
    sums = channels.reshape(-1, *shape).cumsum(1).cumsum(2)
    return np.moveaxis(sums[:, :rows, :columns], 0, -1)


def _differences(start: np.ndarray, stop: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Four times (cell, what is added there)."""
    differences = []
    for edge, sign in ((start, 1.0), (stop, -1.0)):
        cell = np.floor(edge).astype(np.int64)
        differences += [(cell, sign * (1 - (edge - cell))), (cell + 1, sign * (edge - cell))]
    return differences
