"""Waiting for other processes that may take hours: documents are tokenised, weights downloaded. A collective would end the job
after `ddp_timeout` (30 minutes), and under NCCL it keeps multiprocessors busy meanwhile: ranks ask the job's store instead, and
meet in a collective once all are there.

Sent: a few bytes to the store, and a question every half second.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

EVERY = 0.5
"""Seconds between two questions."""
_uses: Counter[str] = Counter()
"""Name -> how often this process has waited under it. All processes wait in one order, so that they use one key."""


def _key(name: str) -> tuple[Any, str]:
    """The job's store, and the key of this use of a name."""
    _uses[name] += 1
    return _get_default_store(), f"hf_longctx/waiting/{name}/{_uses[name]}"


def wait_for_all(name: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Return once every process has come here, however long that takes. Does nothing where there is one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, key = _key(name)
    store.add(key, 1)
    while store.add(key, 0) < dist.get_world_size():
        sleep(EVERY)


@contextmanager
def first_of_machine_first(name: str, local_rank: int, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Yield what is prepared once for a machine: its first process runs the block, then the others do and find it done. Also
    where it fails: the others then fail themselves."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store, key = _key(name)
    done = f"{key}/{dist.get_rank() - local_rank}"
    while local_rank and not store.check([done]):
        sleep(EVERY)
    try:
        yield
    finally:
        if not local_rank:
            store.set(done, "1")
