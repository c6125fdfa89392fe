"""A verb on all ranks: those that torchrun or `accelerate launch` has started, or processes that are started here.

    on_ranks(function, *arguments, ranks=2, cpu=True)     function(device, exchange, *arguments) on each of two ranks

Ranks that are started here meet on a port of the loopback interface, which the system picks. What a user can get wrong is
an error of the command, without a traceback, whichever rank noticed it; if one rank fails, the others are ended. Sent
between ranks here: nothing but barriers.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

LONGEST_WAIT = timedelta(days=1)
"""A rank may wait for another that generates or loads: whoever dies is noticed at once, so this is a safety net."""
USER_ERROR = 2
START = "forkserver"
"""How Python's multiprocessing starts them: forks of a process that has only imported. A fork of this one, which may compute in
threads, may stop for ever; new interpreters would each import for 3 s of a core."""
IMPORTED = ("torch.distributed", "transformers.modeling_utils")
"""Modules that the forked process has imported before."""
RANK_BYTES = 2**29
"""Memory of a process that has imported torch and transformers, and holds no model yet: 0.57 GiB were measured on Linux,
most of it its own."""


def in_words(error: BaseException) -> str:
    """An error as it is shown: of a file, the file and what is wrong with it; of one that says nothing, its type."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and error.filename is None and _folder_is_gone():
        return "the current directory is not there any more: change to one that is"
    return str(error) or type(error).__name__


def _folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def launched() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def has_launcher() -> bool:
    """Whether torchrun or accelerate's launcher of several processes has started this one, be it as the only rank. WORLD_SIZE=1
    alone is no sign of it: clusters set that too, for a machine where ranks are still to be started."""
    return launched() or {"WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def on_cpu() -> bool:
    """Say whether ranks compute on CPUs, as accelerate's launcher says it, or for want of a GPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1") or not gpus()


def gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def refuse_too_many(ranks: int) -> None:
    """Raises ValueError for more processes on processors than this machine's memory holds before they have done anything."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks * RANK_BYTES > memory:
        raise ValueError(
            f"--ranks {ranks} on processors: a process takes {RANK_BYTES / 2**30:g} GiB before it holds a model, {ranks} take "
            f"{ranks * RANK_BYTES / 2**30:,.0f} of this machine's {memory / 2**30:.0f} GiB. Valid: at most "
            f"{memory // RANK_BYTES}, and more than its {cores()} processors make nothing faster"
        )


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_first() -> bool:
    """Whether this rank speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def on_ranks(function: Callable[..., None], *arguments: Any, ranks: int | None, cpu: bool) -> None:
    """Calls function(device, exchange, *arguments) on every rank; exchange is None where there is one only.

    Args:
        function: at the top of a module, so that new processes find it.
        ranks: processes to start where no launcher did; None: the GPUs of this machine, one without any.
        cpu: even if there are GPUs.

    Raises:
        ValueError: more ranks than GPUs, or what `function` raised of that kind.
    """
    cpu = cpu or on_cpu()
    if has_launcher():
        _joined(function, arguments, cpu)
        return
    count = ranks or (1 if cpu else gpus())
    if cpu:
        refuse_too_many(count)
    elif count > gpus():
        raise ValueError(f"--ranks {count} and {gpus()} GPUs here: start at most {gpus()}, or give --cpu")
    if count == 1:
        _joined(function, arguments, cpu)
    else:
        start_ranks(_joined, (function, arguments, cpu), count)


def start_ranks(function: Callable[..., None], arguments: Sequence[Any], ranks: int) -> None:
    """Calls function(*arguments) in `ranks` new processes, whose environment is that of a launcher's, and waits for all.

    Raises:
        ValueError: with the words of a ValueError or OSError that a rank raised.
        ProcessExitedException, ProcessRaisedException: of torch, another error; its traceback was printed by the rank.
    """
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, get_context, start_processes

    get_context(START).set_forkserver_preload([*IMPORTED, function.__module__])
    store = loopback_store()
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = (ranks, store.port, Path(folder), function, tuple(arguments))
            start_processes(_new_rank, given, nprocs=ranks, start_method=START)
        except (ProcessExitedException, ProcessRaisedException):
            messages = sorted(Path(folder).iterdir())
            if not messages:
                raise
            raise ValueError(messages[0].read_text(encoding="utf-8")) from None


def loopback_store() -> Any:
    """Return a store that processes of this machine meet at, and nobody else: torch's own listens on all interfaces."""
    import torch.distributed as dist

    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def _new_rank(
    rank: int, ranks: int, port: int, folder: Path, function: Callable[..., None], arguments: Sequence[Any]
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        function(*arguments)
    except (ValueError, OSError) as error:  # written before peers notice that this rank is gone
        (folder / f"{rank:06}").write_text(in_words(error), encoding="utf-8")
        sys.stdout.flush()
        os._exit(USER_ERROR)  # without waiting for ranks that wait for this one
    except Exception:
        print(f"rank {rank} of {ranks}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        raise


def _joined(function: Callable[..., None], arguments: Sequence[Any], cpu: bool) -> None:
    """One of several ranks, as its environment says, or the only one."""
    import torch
    import torch.distributed as dist

    from hf_longctx.attention.exchange import Exchange

    # A launcher may show each process one GPU alone.
    number = 0 if cpu else int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cpu" if cpu else f"cuda:{number}")
    if cpu:
        torch.set_num_threads(_threads())
    else:
        torch.cuda.set_device(device)
    if not launched():
        function(device, None, *arguments)
        return
    dist.init_process_group("gloo" if cpu else "nccl", timeout=LONGEST_WAIT)
    function(device, Exchange(LONGEST_WAIT.total_seconds()), *arguments)
    dist.barrier()
    dist.destroy_process_group()  # not after an error: a rank that failed must not wait for the others


def _threads() -> int:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, cores() // ranks_here)


@contextmanager
def first_process_first() -> Iterator[None]:
    """Prepare once for a machine: its first rank runs the block, then the others do and find it done. Collective."""
    from hf_longctx.training.waiting import first_of_machine_first

    with first_of_machine_first("preparing", int(os.environ.get("LOCAL_RANK", "0"))):
        yield
