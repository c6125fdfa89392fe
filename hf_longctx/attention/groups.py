"""Process groups of our own, freed once whoever they were made for is gone.

torch keeps every group until the process ends: with gloo three threads that poll, with NCCL a communicator and its buffers
on the device. A program that makes one trainer after another (a hyperparameter search, a notebook, a test suite) would
collect them: a hundred groups cost a rank 5 % of a core.

Groups are made, and freed, by all ranks together. When a rank forgets an owner depends on its garbage collector, so ranks
agree first: a group is freed when the next one is made, if its owner is gone on every rank. Sent: an all-reduce of four
bytes for each group that is there, before a group is made.
"""

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(eq=False)
class _Made:
    """Groups that one call has made."""

    world: weakref.ref
    """the default group of that time"""
    owner: weakref.ref
    groups: list[dist.ProcessGroup]
    """those that this rank is in"""


_made: list[_Made] = []
"""All groups, in one order on all ranks. Kept by the module because torch keeps its groups for the process too."""
COLLECTING_SHARE = 0.05
"""The most of a rank's time that is spent on collecting garbage. One pass takes up to half a second in a process that has
imported much, and a trainer makes half a dozen groups."""
_collect_again = 0.0
"""The time on the monotonic clock from which on garbage is collected again."""


def own_group(
    owner: Any,
    groups: Sequence[Sequence[int]],
    timeout: timedelta,
    *,
    backend: str | None = None,
    options: Callable[[], Any] | None = None,
) -> dist.ProcessGroup:
    """A new process group for the ranks that this one belongs to. Collective: every rank of the job makes all of them.

    Args:
        owner: the object that uses the group; it must outlive every operation on it.
        groups: global ranks of each group; together they hold every rank once.
        timeout: of the group's operations.
        backend: default: that of the job.
        options: makes those of the backend (torch.distributed.ProcessGroupNCCL.Options), anew for each group, or None.
    """
    [own] = own_groups(owner, groups, timeout, backend=backend, options=options)
    return own


def own_groups(
    owner: Any,
    groups: Sequence[Sequence[int]],
    timeout: timedelta,
    *,
    backend: str | None = None,
    options: Callable[[], Any] | None = None,
) -> list[dist.ProcessGroup]:
    """New process groups of which ranks may be in several, or in none: those that this one is in, in order. See `own_group`."""
    _free_forgotten()
    made = [
        dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=None if options is None else options())
        for ranks in groups
    ]
    own = [group for group, ranks in zip(made, groups) if dist.get_rank() in ranks]
    _made.append(_Made(weakref.ref(dist.group.WORLD), weakref.ref(owner), own))
    return own


def _free_forgotten() -> None:
    """Destroy the groups whose owners are gone on all ranks."""
    world = dist.group.WORLD
    _made[:] = [entry for entry in _made if entry.world() is world]  # those of a former job ended with it
    if not _made:
        return
    if any(entry.owner() is not None for entry in _made):
        _collect_garbage()  # trainers are parts of cycles
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    needed = torch.tensor([entry.owner() is not None for entry in _made], dtype=torch.int32, device=device)
    dist.all_reduce(needed, dist.ReduceOp.MAX)
    for entry, keep in zip(list(_made), needed.tolist()):
        if not keep:
            _made.remove(entry)
            for group in entry.groups:
                dist.destroy_process_group(group)


def _collect_garbage() -> None:
    """Collect garbage, unless that was done a moment ago. What stays for that reason is found when a later group is made."""
    global _collect_again
    began = time.monotonic()
    if began < _collect_again:
        return
    gc.collect()
    ended = time.monotonic()
    _collect_again = ended + (ended - began) / COLLECTING_SHARE
