"""Counts the bytes that this rank sends, whoever calls torch.distributed: ours and every peer by the same rules.

Counted where Python hands a tensor to torch.distributed, n ranks in the group:

    point-to-point            what is sent
    all-to-all                (n - 1) / n of the input: a rank's own part does not travel
    all-gather                (n - 1) times the input
    reduce-scatter            (n - 1) / n of the input

These are the fewest bytes with which an operation can be done, not what one algorithm of one backend sends.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d

FUNCTIONAL_ALL_GATHER = "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor"
"""The name of torch's functional all-gather, which 2.11 calls by the second one; later that one calls the first."""


class Traffic:
    """`with Traffic() as traffic:` counts while it is open. Open it before a peer is imported: some keep references."""

    def __init__(self) -> None:
        self.sent = 0
        """Bytes that this rank has sent so far."""
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        for module in (dist, c10d):
            self._count(module, "batch_isend_irecv", lambda call: _sent_by(call["p2p_op_list"]))
            self._count(module, "all_to_all_single", lambda call: _others_part(call["input"], call.get("group")))
            self._count(
                module, "all_gather_into_tensor", lambda call: _to_others(call["input_tensor"], call.get("group"))
            )
            self._count(module, "all_gather", lambda call: _to_others(call["tensor"], call.get("group")))
            self._count(module, "reduce_scatter_tensor", lambda call: _others_part(call["input"], call.get("group")))
        # What torch's context_parallel uses does not pass through the functions above.
        self._count(functional, "permute_tensor", lambda call: call["self"].nbytes)
        self._count(functional, FUNCTIONAL_ALL_GATHER, lambda call: _to_others(call["self"], call["group"]))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, operation in self._originals:
            setattr(module, name, operation)

    def _count(self, module: Any, name: str, bytes_of: Callable[[dict[str, Any]], int]) -> None:
        """Wraps `module.name`; `bytes_of` is given its arguments by name."""
        operation = getattr(module, name)
        signature = inspect.signature(operation)

        @functools.wraps(operation)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.sent += bytes_of(signature.bind(*args, **kwargs).arguments)
            return operation(*args, **kwargs)

        self._originals.append((module, name, operation))
        setattr(module, name, counted)


def _sent_by(operations: list[dist.P2POp]) -> int:
    return sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)


def _others_part(x: torch.Tensor, group: Any) -> int:
    n = dist.get_world_size(group)
    return x.nbytes * (n - 1) // n


def _to_others(x: torch.Tensor, group: Any) -> int:
    return x.nbytes * (dist.get_world_size(group) - 1)
