"""The mean loss of a run, over all its starts: of the steps whose loss is finite.

Trainer adds up all losses, and one that is not finite leaves no number in its sum. This sum lies on the device, and nothing
waits for it but a checkpoint and the end of training.
"""

from collections.abc import Sequence

import torch


class MeanLoss:
    """Mean of the finite losses among those that are added.

    Args:
        device: where losses lie.
        before: what `sums` returned of earlier steps.
    """

    def __init__(self, device: torch.device, before: Sequence[float] = (0.0, 0)) -> None:
        self._sum = torch.tensor(before[0], dtype=torch.float64, device=device)
        self._steps = torch.tensor(before[1], dtype=torch.int64, device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a step, a scalar."""
        finite = loss.detach().isfinite()
        self._sum += torch.where(finite, loss.detach(), 0.0)
        self._steps += finite

    def sums(self) -> tuple[float, int]:
        """Return the sum of the finite losses, and how many they are."""
        return float(self._sum), int(self._steps)

    def mean(self) -> float:
        """Return the mean; NaN where no loss is finite."""
        return float(self._sum / self._steps)
