"""Messages between ranks about checkpoints: small objects, on a process group of their own on the CPU, so that a
background thread may do so while training exchanges on others."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx.attention.groups import own_group


class Ranks:
    """All ranks of the job. Made by all of them together; one process is a job too.

    Args:
        timeout_seconds: how long a rank waits for one that lives but does not come, to make the group and later.
    """

    def __init__(self, timeout_seconds: float = 1800.0) -> None:
        limit = timedelta(seconds=timeout_seconds)
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        self.world_size = 1 if alone else dist.get_world_size()
        self._group = None
        if self.world_size > 1:
            self._group = own_group(self, [range(self.world_size)], limit, backend="gloo")

    def gathered(self, value: Any) -> list[Any]:
        """Return what each rank gave, on every rank. Collective."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agreed(self, value: Any) -> Any:
        """Return what rank 0 gave, on every rank. Collective."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def collected(self, value: Any) -> list[Any] | None:
        """Return what each rank gave, on rank 0; None on the others. Collective."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def exchanged(self, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        """uint8 [bytes] for every rank, one after another -> what every rank sent to this one. Collective."""
        received = torch.empty(sum(received_sizes), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)
        return received
