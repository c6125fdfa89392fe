"""Gradients of weights that tensor parallelism leaves whole, and of which each rank computes a part: norms inside a head, such as
Qwen3's q_norm, see the heads of their rank alone.

transformers sums such a gradient over ranks at the end of each backward, together with what earlier backwards of the step have
left there, which is a sum already. Of k micro-batches on two ranks, whose parts are a and b:

    transformers, before 5.24    2 (... 2 (2 (a1 + b1) / 2 ...     the first counts 2^(k-1) times
    here                         (a1 + b1) + (a2 + b2) + ...       what comes in is summed before it is added

Sent: as many values, to the same ranks, in the same backward.

Gradients that FSDP2 averages over ranks are summed too.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

PLANNED = "replicated_with_grad_allreduce"
"""How a plan of transformers calls such a module."""
WRITTEN_IN = "ReplicatedWithGradAllReduce."
"""The class whose inner functions sum gradients: a module's backward hook (5.17), or hooks of weights that its forward sets."""


def sum_over_ranks(module: Any) -> None:
    """Have FSDP2 sum the gradients of one of its modules over ranks, where it would average them, and transformers 5.20 to 5.22
    divide those of experts once more."""
    module.set_gradient_divide_factor(1.0)
    # Any factor but the number of ranks would otherwise become a reduction that gloo does not have.
    module.set_force_sum_reduction_for_comms(True)


def sum_parts_as_they_come(model: Any) -> None:
    """Have a model's gradients that are parts summed before they are added to others, in place of what transformers does. A model
    without tensor parallelism has none; again: does nothing.

    Raises:
        ValueError: its plan names such modules, and how this transformers sums is not known.
    """
    if (getattr(model, "tp_size", None) or 1) == 1:
        return
    known = 0
    for module in model.modules():
        for group in _taken_over(module):
            module.register_forward_pre_hook(_summing(group))
            module.longctx_sums_parts = True
        known += hasattr(module, "longctx_sums_parts")
    if not known and PLANNED in (getattr(model, "tp_plan", None) or {}).values():
        raise ValueError(
            f"tp_size={model.tp_size}: the plan of {type(model).__name__} has modules of kind {PLANNED!r}, and how this version "
            "of transformers sums their gradients is not known: those of several micro-batches might be summed twice. Valid: "
            "transformers 5.17 to 5.23, or no tensor parallelism"
        )


def _taken_over(module: torch.nn.Module) -> Iterator[dist.ProcessGroup]:
    """Remove what sums a module's gradients; yield the ranks that it sums over."""
    for number, hook in list(module._backward_hooks.items()):
        if getattr(hook, "__qualname__", "").startswith(WRITTEN_IN):
            del module._backward_hooks[number]
            yield _group_of(hook)
    forward: Any = vars(module).get("forward")
    if getattr(forward, "__qualname__", "").startswith(WRITTEN_IN):
        inside = inspect.getclosurevars(forward).nonlocals
        del module.forward
        if inside["original_forward"] != module.forward:
            module.forward = inside["original_forward"]
        for weight in module.parameters(recurse=False):  # those of a forward before this
            hooks = weight._post_accumulate_grad_hooks or {}
            for number in [number for number, hook in hooks.items() if hook is inside["_all_reduce_grad"]]:
                del hooks[number]
        yield _group_of(inside["_all_reduce_grad"])


def _group_of(summing: Callable[..., Any]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = inspect.getclosurevars(summing).nonlocals["mesh"].get_group()
    return group


def _summing(group: dist.ProcessGroup) -> Callable[..., None]:
    """Return a hook for before a module's forward. Weights are there then, also where FSDP2 gathers them."""
    known: dict[str, torch.nn.Parameter] = {}

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    def before_forward(module: torch.nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and known.get(name) is not weight:
                weight.register_hook(summed)
                known[name] = weight

    return before_forward
