"""Weights under FSDP2 that a rank's backward has no gradient for, where another's has one.

FSDP2 reduces in one message what the weights of a part have gradients for, whichever these are: ranks would sum different
weights, or one would wait for a message that another never sends. So each rank has zeros for the others, made just before
they are sent. torch can do so from 2.13 on (`set_reduce_scatter_unused_params`), but in the dtype of weights, and it refuses to
reduce them with gradients that wait in the dtype of sums, as zero1's do in half precision.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def reduce_unused(module: FSDPModule) -> None:
    """Have a part reduce gradients of all its trained weights in each backward that reduces, zeros where it has had none."""
    state: Any = module._get_fsdp_state()
    # torch 2.11 has one group of weights, or none, in a part; 2.12 has a list.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            group.post_backward = partial(_with_zeros, group, group.post_backward)


def _with_zeros(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    if group.reduce_grads:
        weights = [
            weight
            for weight in group.fsdp_params
            if hasattr(weight, "_unsharded_param") and weight._unsharded_param.requires_grad
        ]
        waiting = any(weight.unsharded_accumulated_grad is not None for weight in weights)
        for weight in weights:
            if weight.unsharded_accumulated_grad is None:
                whole = weight._unsharded_param
                if whole.grad is None:
                    whole.grad = torch.zeros_like(whole)
                if waiting:  # the message has one dtype
                    weight.to_accumulated_grad_if_needed()
    reduce(*unused)
