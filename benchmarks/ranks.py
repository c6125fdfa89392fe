"""Runs a function on gloo ranks, each a fresh process with one computing thread, and returns what each of them returned.

The parent holds the store on a port that the system picks. A rank that raises or dies ends the benchmark with its own
error; its peers find their connections closed.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another one in a collective operation."""


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(*args)` on `world_size` ranks, with torch.distributed initialised; the results in rank order. One rank is
    a process like any other, without torch.distributed.

    Raises:
        Exception: the error of the first rank that failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(world_size, mp_context=multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(_rank, rank, world_size, store.port, function, args) for rank in range(world_size)]
        for call in wait(calls, return_when=FIRST_EXCEPTION).done:
            call.result()
        return [call.result() for call in calls]


def _rank(rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    if world_size == 1:
        return function(*args)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result
