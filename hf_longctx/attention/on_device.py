"""Numbers that are known on the host, brought to a device without waiting for it.

CUDA copies beside compute only from pinned memory: from pageable memory the host stands until all that was launched before has
run, and then the device stands until the host has launched more. Nothing is sent between ranks.
"""

import numpy as np
import torch


def on_device(numbers: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give a device an array or tensor of the host; on a CPU it is the same memory."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
