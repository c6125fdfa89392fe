"""NCCL's order of operations, on gloo.

NCCL runs the operations of one communicator strictly in the order in which this process issued them: each begins only
when the one before it is complete. Gloo starts every operation at once, so a program in which two ranks issue the
operations of one group in different orders passes on gloo and hangs on NCCL:

    rank 0: all_reduce, then send/recv with 1       rank 1: send/recv with 0, then all_reduce

Inside `in_order_communicators()` each process group of this process has one first-in-first-out queue. An operation, or a
whole `batch_isend_irecv` (NCCL coalesces it into one operation), begins when the preceding one is complete. Groups do not
wait for each other, unless asked to (`one_at_a_time`), as where a device runs one kernel of NCCL's at a time. A program
that would hang on NCCL hangs here too; the rank pool's timeout ends it and prints
`pending_operations()`.

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


Started = tuple[list[Any], Callable[[], Any]]
"""Handles of an operation that has begun, and what gives its outputs once they are complete."""


class InOrderWork(dist.Work):
    """The handle of one operation."""

    def __init__(self, describe: Callable[[], str], start: Callable[[], Started], queue: "_Queue"):
        super().__init__()
        self.describe = describe
        """called for reports alone: there are thousands of operations, and hardly ever a report"""
        self._start: Callable[[], Started] | None = start
        self._queue = queue
        self._handles: list[Any] = []
        self._outputs: Callable[[], Any] = lambda: None
        self._begun = threading.Event()
        self._settling = threading.Lock()
        self._settled = False
        self._value: Any = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Start the operation, and do not wait for it."""
        start, self._start = self._start, None
        assert start is not None, "an operation begins once"
        inside, _thread.serves_queue = _in_queue_thread(), True
        try:
            with torch.no_grad():
                self._handles, self._outputs = start()
        except Exception as error:
            self._error = error
        finally:
            _thread.serves_queue = inside
            self._begun.set()

    def settle(self) -> None:
        """Block until the operation is complete or has failed. Gloo's handles are waited for once: whoever comes later finds it
        settled."""
        self._begun.wait()
        with self._settling:
            if self._settled:
                return
            try:
                for handle in self._handles:
                    handle.wait()
                if self._error is None:
                    self._value = self._outputs()
            except Exception as error:
                self._error = error
            self._handles, self._outputs, self.describe = [], lambda: None, lambda: "complete"
            self._settled = True
        self._queue.forget(self)

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation is complete, whatever the timeout; raise its error if it failed."""
        self.result()
        return True

    def is_completed(self) -> bool:
        return self._settled or (self._begun.is_set() and all(handle.is_completed() for handle in self._handles))

    def get_future(self) -> torch.futures.Future:
        """A future of the operation's outputs, in the form in which `ProcessGroup` takes them."""
        future: torch.futures.Future = torch.futures.Future()

        def fulfil() -> None:
            try:
                future.set_result(self.result())
            except Exception as error:
                future.set_exception(error)

        self._queue.afterwards(fulfil)
        return future

    def result(self) -> Any:
        self.settle()
        if self._error is not None:
            raise self._error
        return self._value

    def _source_rank(self) -> int:
        return self.result()


class _Turn:
    """The handle of what its caller does itself, between its turn and its end."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.ended.wait()

    def is_completed(self) -> bool:
        return self.ended.is_set()


class _Queue:
    """The operations of one process group: one runs, the others wait their turn. One that need not wait begins at once, in the
    thread that issues it; a thread of the queue begins the others."""

    def __init__(self, group_name: str):
        self.group_name = group_name
        self._lock = threading.Lock()
        self._running: InOrderWork | None = None
        self._waiting: list[InOrderWork] = []
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def submit(self, work: InOrderWork) -> InOrderWork:
        with self._lock:
            at_once = not self._waiting and (self._running is None or self._running.is_completed())
            if at_once:
                self._running = work
            else:
                self._waiting.append(work)
        if at_once:
            work.begin()
        else:
            self.afterwards(lambda: self._run(work))
        return work

    def afterwards(self, job: Callable[[], None]) -> None:
        """Run a job in the thread of the queue, after those that it was given before."""
        with self._lock:
            if self._thread is None:
                name = f"in-order group {self.group_name}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def forget(self, work: InOrderWork) -> None:
        """Keep nothing of an operation that is complete."""
        with self._lock:
            if self._running is work:
                self._running = None

    def finish(self) -> None:
        """Wait until every operation is complete, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        running = self._running
        if running is not None:
            running.settle()

    def pending(self) -> list[str]:
        running = self._running
        names = [running.describe()] if running is not None and not running.is_completed() else []
        return names + [work.describe() for work in self._waiting]

    def _run(self, work: InOrderWork) -> None:
        running = self._running
        if running is not None:
            running.settle()
        with self._lock:
            self._waiting.remove(work)
            self._running = work
        work.begin()
        work.settle()

    def _serve(self) -> None:
        _thread.serves_queue = True
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job()


class _Communicators:
    """The queues of this process, one per process group or one for all, each made at its first operation."""

    def __init__(self, one_at_a_time: bool) -> None:
        self.queues: dict[str, _Queue] = {}
        self._one_at_a_time = one_at_a_time
        self._lock = threading.Lock()  # the backward pass submits from a thread of its own

    def submit(self, group_name: str, describe: Callable[[], str], start: Callable[[], Started]) -> InOrderWork:
        group_name = "of the device" if self._one_at_a_time else group_name
        with self._lock:
            if group_name not in self.queues:
                self.queues[group_name] = _Queue(group_name)
            own = self.queues[group_name]
            return own.submit(InOrderWork(describe, start, own))

    def method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`ProcessGroup.name`, queued."""

        def queued(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if _in_queue_thread():
                return original(group, *args, **kwargs)

            def start() -> Started:
                work = original(group, *args, **kwargs)
                if name == "recv_anysource":
                    return [work], work._source_rank
                return [work], lambda: args[0] if args else None  # the outputs come first in every method but `barrier`

            return self.submit(group.group_name, lambda: f"{name}({_describe([*args, *kwargs.values()])})", start)

        return queued

    def batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`batch_isend_irecv`, queued as one operation, with one handle for all of it as NCCL has."""

        def queued(p2p_op_list: list[dist.P2POp]) -> list[Any]:
            if _in_queue_thread():
                return original(p2p_op_list)
            distributed_c10d._check_p2p_op_list(p2p_op_list)

            def start() -> Started:
                return original(p2p_op_list), lambda: None

            def describe() -> str:
                operations = (
                    f"{operation.op.__name__}({_describe(operation.tensor)}, peer {operation.peer})"
                    for operation in p2p_op_list
                )
                return f"batch of {', '.join(operations)}"

            return [self.submit(p2p_op_list[0].group.group_name, describe, start)]

        return queued

    def functional(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.ops._c10d_functional.name`, queued and complete on return. Its last argument is the group's name."""

        def queued(*args: Any) -> Any:
            # Runs in the caller's thread, when its turn comes: autograd would not see it in another.
            turn = _Turn()

            def start() -> Started:
                turn.begun.set()
                return [turn], lambda: None

            self.submit(args[-1], lambda: f"{name}({_describe(list(args[:-1]))})", start)
            turn.begun.wait()
            try:
                output = original(*args)
                with torch.no_grad():
                    for tensor in output if isinstance(output, list) else [output]:
                        torch.ops._c10d_functional.wait_tensor(tensor)
                return output
            finally:
                turn.ended.set()

        return queued


_thread = threading.local()
_active: _Communicators | None = None


@contextlib.contextmanager
def in_order_communicators(*, one_at_a_time: bool = False) -> Iterator[None]:
    """While active, the operations of each process group of this process run one after the other, as on NCCL; with
    `one_at_a_time` those of all its groups.

    To be entered by every rank, with no operation in flight. Waits for all operations when it ends without an error.
    """
    global _active
    assert _active is None, "in_order_communicators() does not nest"
    _active = _Communicators(one_at_a_time)
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
            for group_queue in _active.queues.values():
                group_queue.finish()
    finally:
        _active = None


def pending_operations() -> list[str]:
    """Return what each queue of this process runs and what waits behind it, one line per group that is not idle."""
    lines = []
    for group_queue in list(_active.queues.values()) if _active else []:
        if names := group_queue.pending():
            waiting = f"; behind it wait {len(names) - 1}: {'; '.join(names[1:6])}" if names[1:] else ""
            lines.append(f"in-order group {group_queue.group_name!r} has not completed {names[0]}{waiting}")
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
        return ", ".join(text for argument in arguments if (text := _describe(argument)))
    return str(arguments) if isinstance(arguments, int | str) else ""
