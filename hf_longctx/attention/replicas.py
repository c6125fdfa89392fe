"""A model's copies for virtual ranks (virtual_ranks.py): what ranks have of their own is copied, the weights' memory is shared.

Threads that ran one model would add to the same gradients at the same time, and see each other's buffers. Nothing is sent here.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

Model = TypeVar("Model", bound=torch.nn.Module)


def replicate(model: Model, count: int) -> list[Model]:
    """Copy a module once for each virtual rank. Each copy has modules, buffers and gradients of its own, as ranks have, while
    the memory of the weights is shared with the original.

    What a hook or another function that hangs on a module refers to stays the original's; hooks on parameters are not copied.

    Args:
        model: any module. Its gradients are not copied.
        count: how many.

    Raises:
        ValueError: a parameter is not an ordinary torch.nn.Parameter (sharded, quantised): its memory cannot be shared.
    """
    for name, parameter in model.named_parameters():
        if type(parameter) is not torch.nn.Parameter:
            raise ValueError(
                f"{name} is a {type(parameter).__name__}, whose memory copies cannot share: replicate a model of ordinary "
                "parameters (torch.nn.Parameter), not sharded and not quantised"
            )
    return [_copy_of(model) for _ in range(count)]


def _copy_of(model: Model) -> Model:
    """Copy all but the parameters' memory: to deepcopy, the new parameters are copies that it has made already."""
    shared: dict[int, Any] = {
        id(parameter): torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, shared)


def add_gradients(model: torch.nn.Module, replicas: Sequence[torch.nn.Module]) -> None:
    """Add the gradients of replicas to the model's own, in the order of ranks, as a step sums those of real ranks. The replicas'
    are given up. A parameter that no replica has a gradient of is left as it is."""
    for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
        for copied in copies:
            if copied.grad is not None:
                parameter.grad = copied.grad if parameter.grad is None else parameter.grad + copied.grad
                copied.grad = None
