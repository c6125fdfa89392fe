"""Tensors that a computation makes, whatever the device does with them: the largest, and those that are still there."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


class MadeTensors(TorchDispatchMode):
    """Remembers all tensors that operations give, and holds none."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._made.append(weakref.ref(result))
        return result

    def alive(self, like: torch.Tensor) -> int:
        """How many tensors of a shape are still there, in memory that is not the given one's."""
        own = like.untyped_storage().data_ptr()
        tensors = [tensor for reference in self._made if (tensor := reference()) is not None]
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.shape == like.shape}
        return len(places - {own})
