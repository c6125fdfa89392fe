"""The mean loss of a run: of the steps whose loss is finite.

Trainer adds up all losses, and one that is not finite leaves no number in its sum. This sum lies on the device, and nothing
waits for it before training ends.
"""

import torch


class MeanLoss:
    """Mean of the finite losses among those that are added.

    Args:
        device: where losses lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a step, a scalar."""
        finite = loss.detach().isfinite()
        self._sum += torch.where(finite, loss.detach(), 0.0)
        self._steps += finite

    def mean(self) -> float:
        """Return the mean; NaN where no loss is finite."""
        return float(self._sum / self._steps)
