"""NCCL's order of operations, on gloo.

NCCL runs the operations of one communicator strictly in the order in which this process issued them: each begins only
when the one before it is complete. Gloo starts every operation at once, so a program in which two ranks issue the
operations of one group in different orders passes on gloo and hangs on NCCL:

    rank 0: all_reduce, then send/recv with 1       rank 1: send/recv with 0, then all_reduce

Inside `in_order_communicators()` each process group of this process has one first-in-first-out queue, served by a
thread. An operation, or a whole `batch_isend_irecv` (NCCL coalesces it into one operation), is taken from its queue
when the preceding one is complete. Groups do not wait for each other. A program that would hang on NCCL hangs here
too; the rank pool's timeout ends it and prints `pending_operations()`.

What is queued: every method of `ProcessGroup` that communicates, and so all of `torch.distributed`, object collectives,
device meshes and FSDP2 included, however they were imported; functional collectives (which here block until done:
stricter than NCCL); the gradient reduction of `DistributedDataParallel`, which is C++ and therefore gets torch's own
all-reduce communication hook before its first synchronised forward. What is not: what DDP does in C++ at construction
and for buffers (`broadcast_buffers=False` avoids the latter), and `monitored_barrier`. Import of `batch_isend_irecv` by
name before the context is entered splits its batches: write `dist.batch_isend_irecv`.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

# Names differ between versions of torch: those that the installed one has are replaced.
GROUP_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
FUNCTIONAL_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "all_to_all_single"),
    *("all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)


class InOrderWork(dist.Work):
    """The handle of one queued operation."""

    def __init__(self, name: str, start: Callable[[], Any]):
        super().__init__()
        self.name = name
        self._start = start
        self._done: torch.futures.Future = torch.futures.Future()

    def run(self) -> None:
        """Start the operation and wait until it is complete (in the thread of its queue)."""
        try:
            self._done.set_result(self._start())
        except Exception as error:
            self._done.set_exception(error)

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation is complete, whatever the timeout; raise its error if it failed."""
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> torch.futures.Future:
        """A future of the operation's outputs, in the form in which `ProcessGroup` takes them."""
        return self._done

    def result(self) -> Any:
        return self._done.wait()

    def _source_rank(self) -> int:
        return self._done.wait()


class _Queue:
    """The operations of one process group: one runs, the others wait their turn."""

    def __init__(self, group_name: str):
        self.group_name = group_name
        self._submitted: queue.Queue[InOrderWork | None] = queue.Queue()
        self._pending: list[InOrderWork] = []
        self._thread = threading.Thread(target=self._serve, name=f"in-order group {group_name}", daemon=True)
        self._thread.start()

    def submit(self, work: InOrderWork) -> InOrderWork:
        self._pending.append(work)
        self._submitted.put(work)
        return work

    def finish(self) -> None:
        """Wait until every operation is complete, and end the thread."""
        self._submitted.put(None)
        self._thread.join()

    def pending(self) -> list[str]:
        return [work.name for work in self._pending]

    def _serve(self) -> None:
        _thread.serves_queue = True
        with torch.no_grad():
            while (work := self._submitted.get()) is not None:
                work.run()
                self._pending.remove(work)


class _Communicators:
    """The queues of this process, one per process group, each made at the group's first operation."""

    def __init__(self) -> None:
        self.queues: dict[str, _Queue] = {}
        self._lock = threading.Lock()  # the backward pass submits from a thread of its own

    def submit(self, group_name: str, name: str, start: Callable[[], Any]) -> InOrderWork:
        with self._lock:
            if group_name not in self.queues:
                self.queues[group_name] = _Queue(group_name)
            return self.queues[group_name].submit(InOrderWork(name, start))

    def method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`ProcessGroup.name`, queued."""

        def queued(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if _in_queue_thread():
                return original(group, *args, **kwargs)

            def start() -> Any:
                work = original(group, *args, **kwargs)
                work.wait()
                if name == "recv_anysource":
                    return work._source_rank()
                return args[0] if args else None  # the outputs come first in every method but `barrier`

            return self.submit(group.group_name, f"{name}({_describe([*args, *kwargs.values()])})", start)

        return queued

    def batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`batch_isend_irecv`, queued as one operation, with one handle for all of it as NCCL has."""

        def queued(p2p_op_list: list[dist.P2POp]) -> list[Any]:
            if _in_queue_thread():
                return original(p2p_op_list)
            distributed_c10d._check_p2p_op_list(p2p_op_list)

            def start() -> None:
                for work in original(p2p_op_list):
                    work.wait()

            operations = (f"{each.op.__name__}({_describe(each.tensor)}, peer {each.peer})" for each in p2p_op_list)
            return [self.submit(p2p_op_list[0].group.group_name, f"batch of {', '.join(operations)}", start)]

        return queued

    def functional(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.ops._c10d_functional.name`, queued and complete on return. Its last argument is the group's name."""

        def queued(*args: Any) -> Any:
            # Runs in the caller's thread, when its turn comes: autograd would not see it in another.
            turn, done = threading.Event(), threading.Event()

            def start() -> None:
                turn.set()
                done.wait()

            self.submit(args[-1], f"{name}({_describe(list(args[:-1]))})", start)
            turn.wait()
            try:
                output = original(*args)
                with torch.no_grad():
                    for tensor in output if isinstance(output, list) else [output]:
                        torch.ops._c10d_functional.wait_tensor(tensor)
                return output
            finally:
                done.set()

        return queued


_thread = threading.local()
_active: _Communicators | None = None


@contextlib.contextmanager
def in_order_communicators() -> Iterator[None]:
    """While active, the operations of each process group of this process run one after the other, as on NCCL.

    To be entered by every rank, with no operation in flight. Waits for all operations when it ends without an error.
    """
    global _active
    assert _active is None, "in_order_communicators() does not nest"
    _active = _Communicators()
    functional = torch.ops._c10d_functional
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in GROUP_METHODS:
                if original := getattr(dist.ProcessGroup, name, None):
                    patch.setattr(dist.ProcessGroup, name, _active.method(name, original))
            for name in FUNCTIONAL_COLLECTIVES:
                patch.setattr(functional, name, _active.functional(name, getattr(functional, name)))
            batch = _active.batch(dist.batch_isend_irecv)
            patch.setattr(dist, "batch_isend_irecv", batch)
            patch.setattr(distributed_c10d, "batch_isend_irecv", batch)
            patch.setattr(DistributedDataParallel, "_pre_forward", _with_hook(DistributedDataParallel._pre_forward))
            yield
            for each in _active.queues.values():
                each.finish()
    finally:
        _active = None


def pending_operations() -> list[str]:
    """What each queue of this process runs and what waits behind it, one line per group that is not idle."""
    lines = []
    for each in list(_active.queues.values()) if _active else []:
        if names := each.pending():
            waiting = f"; behind it wait {len(names) - 1}: {'; '.join(names[1:6])}" if names[1:] else ""
            lines.append(f"in-order group {each.group_name!r} has not completed {names[0]}{waiting}")
    return lines


def _with_hook(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    """DDP reduces gradients in C++, past every queue. torch's all-reduce hook does the same through Python."""

    def hooked(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync and not ddp._comm_hooks:
            ddp.register_comm_hook(ddp.process_group, allreduce_hook)
        return pre_forward(ddp, *args, **kwargs)

    return hooked


def _in_queue_thread() -> bool:
    return getattr(_thread, "serves_queue", False)


def _describe(arguments: Any) -> str:
    """Tensors and numbers among the arguments, e.g. `float32[4, 256], 1`."""
    if isinstance(arguments, torch.Tensor):
        return f"{str(arguments.dtype).removeprefix('torch.')}{list(arguments.shape)}"
    if isinstance(arguments, list | tuple):
        return ", ".join(text for each in arguments if (text := _describe(each)))
    return str(arguments) if isinstance(arguments, int | str) else ""
