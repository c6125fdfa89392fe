"""Virtual ranks: the ranks of a layout as threads of one process, which exchange messages through memory.

    layout = Layout(zigzag(0, 1000, range(2)))
    copies = replicate(model, 2)                                     # replicas.py
    run_on_virtual_ranks(2, lambda exchange: loss_of(copies[exchange.rank], layout, exchange).backward())
    add_gradients(model, copies)

torch.distributed is not needed. A layout's messages and results are those of real ranks; how long they take is not.

Turns. One thread runs at a time, from one wait for a message to the next; then the next rank in a circle that can go on has its
turn. So every run is the same, modeling code need not be safe for threads between two waits, and "no rank can go on" is a fact
and no guess from time: a deadlock raises DeadlockError at once. Ranks must therefore meet through their exchange alone: a rank
that waited for another in any other way (a barrier, a collective) would keep the turn for ever.

Messages. As NCCL does, a rank runs the operations of one group (communicators.py) strictly in the order in which it started
them: each batch begins when the one before it is complete, and a send is complete when its receive is. The message is copied
there and then from buffer to buffer; what would wait for ever on NCCL does so here, and is reported.

    rank 0   start [to 1, from 1] | compute | wait ........ turn passes ......... | compute with what came
    rank 1                                  | start [to 0, from 0]: both copied | wait: complete, goes on

Backward. Autograd runs the backward of CUDA tensors in one thread per device, in which the backward of one rank would wait for
that of another queued behind it. A virtual rank runs under torch.autograd.set_multithreading_enabled(False), which is set for
each thread: the engine then puts nodes of every device into the queue of the thread that called backward (Engine::ready_queue
in torch/csrc/autograd/engine.cpp; torch's own threaded process group for tests does the same). A backward that would run in the
shared thread after all is refused.

Each virtual rank begins with the state that the caller's thread had: context variables, grad and inference mode, autocast,
modes of torch functions and dispatch, CUDA device and stream. Each draws from a random state of its own of torch's generators,
which begins as the caller's, as ranks seeded alike do; the caller's stays as it was. What torch keeps for the whole process
(default dtype, deterministic algorithms, matmul precision) holds in all. Not carried over: saved-tensor hooks, profilers, and
torch.func's transforms; Python's and NumPy's global generators are shared by all threads, who draw from them in turn.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import permutations
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

from hf_longctx.attention.communicators import BETWEEN_GRADIENTS, LANES
from hf_longctx.attention.exchange import Batch, Exchange, Messages, Pending, Work
from hf_longctx.supervision.progress import Progress, ranks_in_words

Result = TypeVar("Result")


class DeadlockError(RuntimeError):
    """Every virtual rank that has not ended waits for a message, and none of these will come."""


def run_on_virtual_ranks(
    world_size: int,
    function: Callable[[Exchange], Result],
    *,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
) -> list[Result]:
    """Call `function(exchange)` once on each of `world_size` ranks, which are threads of this process.

    Args:
        world_size: how many ranks.
        function: gets its own rank's exchange, and must wait for other ranks through it alone. All ranks share what else it
            refers to; a model that learns is replicated first (replicas.py).
        device: where the tensors are that travel. On CUDA all ranks use the caller's current stream.
        ranks_per_node: rank // ranks_per_node is the node that a rank pretends to be on; default: one node.

    Returns:
        What each rank returned, by rank.

    Raises:
        ValueError: world_size is not positive, or the ranks do not fill nodes evenly.
        DeadlockError: ranks wait for messages that nobody will send or receive; says who waits for what.
        RuntimeError: a message was left behind: all ranks ended, and it was never received or never sent.
        Exception: what a rank raised first, of whatever class, with a note that names the rank. The others are released from
            their waits by a RuntimeError, so that their context managers and `finally` clauses run.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: there is at least one virtual rank")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    world = _World(world_size, device)
    node = world_size if ranks_per_node is None else ranks_per_node
    exchanges = [VirtualExchange(world, rank, node) for rank in range(world_size)]
    carried = _carried_over(device)
    results: dict[int, Result] = {}

    def run(exchange: VirtualExchange) -> None:
        try:
            world.take_turn(exchange.rank)
            if world.failure is None:
                with carried():
                    results[exchange.rank] = function(exchange)
        except BaseException as error:  # SystemExit too: it is the caller's to handle
            if world.failure is None:
                error.add_note(f"This was raised on virtual rank {exchange.rank} of {world_size}.")
                world.failure = error
        finally:
            world.end(exchange.rank)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(run, exchange), name=f"virtual rank {rank}", daemon=True
        )
        for rank, exchange in enumerate(exchanges)
    ]
    world.run(threads)
    failure, world.failure = world.failure, None
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, and with it all ranks' tensors
    return [results[rank] for rank in range(world_size)]


class VirtualExchange(Exchange):
    """The exchange as one virtual rank sees it; `run_on_virtual_ranks` makes it. All that an Exchange offers, with messages
    that travel through memory."""

    def __init__(self, world: "_World", rank: int, ranks_per_node: int) -> None:
        self._world = world
        self.device = world.device
        self._take_place(range(world.size), rank, ranks_per_node, Progress())

    def begin(self, batch: Batch) -> Pending:
        self._world.check(self.rank)
        return super().begin(batch)

    def all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        parts = [own.contiguous() if rank == self.rank else torch.empty_like(own) for rank in range(self.world_size)]
        others = [(part, rank) for rank, part in enumerate(parts) if rank != self.rank]
        self.start([(parts[self.rank], rank) for _, rank in others], others).wait()
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self.all_gather(tensor)[source])

    def _operations(self, sends: Messages, receives: Messages, lane: str) -> Any:
        """Check the messages. Raises ValueError for a tensor or a rank that a real exchange could not serve either."""
        for tensor, rank in (*sends, *receives):
            if rank == self.rank or rank not in range(self.world_size):
                others = [other for other in range(self.world_size) if other != self.rank]
                raise ValueError(
                    f"rank {self.rank} exchanges a message with rank {rank}; valid are the other ranks, {others}"
                )
            if tensor.device != self.device or not tensor.is_contiguous():
                raise ValueError(
                    f"rank {self.rank} exchanges a tensor {tuple(tensor.shape)} of strides {tensor.stride()} on "
                    f"{tensor.device} with rank {rank}: it must be contiguous and on {self.device}; give "
                    "run_on_virtual_ranks another device, or move the tensor"
                )
        return sends, receives

    def _begin(self, operations: Any, lane: str) -> Sequence[Work]:
        """Put messages under way."""
        batch = _Batch(self._world, self.rank, lane, *operations)
        if not batch.complete:
            self._world.post(batch)
        return [batch]


class _Batch:
    """Holds the messages of one call of `start` that are still to travel."""

    def __init__(
        self,
        world: "_World",
        rank: int,
        lane: str,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        self._world, self.rank, self.lane = world, rank, lane
        self.sends = _by_peer(sends)
        self.receives = _by_peer(receives)

    @property
    def complete(self) -> bool:
        return not any(self.sends.values()) and not any(self.receives.values())

    def wait(self) -> None:
        """Pass the turn on until all has been sent and received. Raises RuntimeError where another rank has failed."""
        self._world.wait(self)

    def __str__(self) -> str:
        """Describe what is outstanding, such as "to receive float32 [2, 3] from rank 1, and to send float32 [4] to rank 2"."""
        gradients = " (gradients)" if self.lane == BETWEEN_GRADIENTS else ""
        waits = [
            f"to {verb} {', '.join(map(_described, tensors))}{gradients} {where} rank {peer}"
            for verb, where, peers in (("receive", "from", self.receives), ("send", "to", self.sends))
            for peer, tensors in peers.items()
            if tensors
        ]
        return ", and ".join(waits)


def _by_peer(messages: Sequence[tuple[torch.Tensor, int]]) -> dict[int, deque[torch.Tensor]]:
    """Sort messages by the rank at their other end. Those of one rank keep their order."""
    peers: dict[int, deque[torch.Tensor]] = {}
    for tensor, rank in messages:
        peers.setdefault(rank, deque()).append(tensor)
    return peers


def _described(tensor: torch.Tensor) -> str:
    """Describe a tensor, such as "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class _World:
    """Holds whose turn it is, and the messages under way. Only the thread that has the turn touches it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.failure: BaseException | None = None
        """Raised in the caller; once there is one, nobody waits any more."""
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._random = [_random_state(device)] * size
        """Each rank's state of torch's generators, while it does not have the turn."""
        self._awaited: dict[int, _Batch] = {}
        """Rank -> the batch that it waits for."""
        self._ended: set[int] = set()
        self._queues: dict[str, list[deque[_Batch]]] = {lane: [deque() for _ in range(size)] for lane in LANES}
        """Lane -> of each rank, its batches that are not complete, in order; the first one is under way."""

    def run(self, threads: Sequence[threading.Thread]) -> None:
        """Run the ranks' threads to their ends. The caller's random state stays as it was."""
        before = _random_state(self.device)
        try:
            for thread in threads:
                thread.start()
            self._turns[0].release()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt from the keyboard: ranks leave at their next message
            self.failure = self.failure or error
            for thread in threads:
                thread.join()
        finally:
            with self._reporting():
                _set_random_state(before, self.device)
        left = [batch for queues in self._queues.values() for queue in queues for batch in queue]
        if self.failure is None and left:
            self.failure = RuntimeError(
                "virtual ranks ended and left messages behind: "
                + "; ".join(f"rank {batch.rank} still had {batch}" for batch in left)
                + ". Each message needs a send and a receive"
            )

    def take_turn(self, rank: int) -> None:
        """Block until this rank has the turn."""
        self._turns[rank].acquire()
        with self._reporting():
            _set_random_state(self._random[rank], self.device)

    def pass_turn(self, rank: int) -> None:
        """Let the next rank run that can go on, after `rank` in a circle. If there is none, ranks have met a deadlock."""
        with self._reporting():
            self._random[rank] = _random_state(self.device)
        circle = [(rank + step) % self.size for step in range(1, self.size + 1)]
        live = [other for other in circle if other not in self._ended]
        able = [other for other in live if other not in self._awaited or self._awaited[other].complete]
        if live and not able and self.failure is None:
            self.failure = DeadlockError(self._deadlock())
        if self.failure is not None:
            able = live
        if able:
            self._turns[able[0]].release()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Make an error of the device the run's failure, which ranks that wait are told: it may come up anywhere."""
        try:
            yield
        except RuntimeError as error:
            self.failure = self.failure or error

    def end(self, rank: int) -> None:
        """Give the turn away for good."""
        self._ended.add(rank)
        self.pass_turn(rank)

    def check(self, rank: int) -> None:
        """Raise RuntimeError where a rank cannot exchange messages here and now."""
        if self.failure is not None:
            raise RuntimeError(f"virtual rank {rank} stops, because the run has failed: {self.failure!r}")
        if self._stream is not None and torch.cuda.current_stream(self.device) != self._stream:
            raise RuntimeError(
                f"virtual rank {rank} exchanges a message on {torch.cuda.current_stream(self.device)}, but copies are ordered "
                f"on one stream only: the one of the caller of run_on_virtual_ranks, {self._stream}"
            )
        in_backward = torch._C._current_graph_task_id() != -1
        if self.device.type == "cuda" and in_backward and torch._C._is_multithreading_enabled():
            raise RuntimeError(
                f"virtual rank {rank} runs backward in autograd's thread for {self.device}, which all ranks share and none "
                "may wait in: call backward in the rank's own thread, or within "
                "torch.autograd.set_multithreading_enabled(False)"
            )

    def post(self, batch: _Batch) -> None:
        """Put a batch behind those that its rank started before, and copy what can be copied."""
        self._queues[batch.lane][batch.rank].append(batch)
        self._deliver(self._queues[batch.lane])

    def wait(self, batch: _Batch) -> None:
        """Let other ranks run until the batch is complete."""
        if not batch.complete:
            self._awaited[batch.rank] = batch
            self.pass_turn(batch.rank)
            self.take_turn(batch.rank)
            del self._awaited[batch.rank]
        self.check(batch.rank)

    def _deliver(self, queues: list[deque[_Batch]]) -> None:
        """Copy each message whose send and receive are under way; a batch that this completes lets its rank's next one in."""
        moved = True
        while moved:
            moved = False
            for source, destination in permutations(range(self.size), 2):
                if queues[source] and queues[destination]:
                    sends = queues[source][0].sends.get(destination)
                    receives = queues[destination][0].receives.get(source)
                    while sends and receives:
                        _copy(sends[0], receives[0], source, destination)
                        sends.popleft(), receives.popleft()
                        moved = True
            for queue in queues:
                while queue and queue[0].complete:
                    queue.popleft()

    def _deadlock(self) -> str:
        """Say who waits for what."""
        waiting = []
        for rank, batch in sorted(self._awaited.items()):
            first = self._queues[batch.lane][rank][0]
            before = "" if first is batch else ", which it started before what it waits for"
            waiting.append(f"rank {rank} waits {first}{before}")
        ended = [f"{ranks_in_words(list(self._ended))} ended"] if self._ended else []
        return "no virtual rank can go on: " + "; ".join(waiting + ended)


def _copy(sent: torch.Tensor, received: torch.Tensor, source: int, destination: int) -> None:
    """Copy one message. Raises ValueError where the two ends disagree."""
    if sent.dtype != received.dtype or sent.numel() != received.numel():
        raise ValueError(
            f"rank {source} sends {_described(sent)} where rank {destination} expects {_described(received)}: they must agree in "
            "dtype and number of values"
        )
    with torch.inference_mode():  # nothing is recorded, and tensors of either mode may be written
        received.view(-1).copy_(sent.view(-1))


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read the state of torch's generator of the CPU, and of the device if that is CUDA."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _carried_over(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Note what torch keeps for this thread; the context returned gives it to another one."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    cached = torch.is_autocast_cache_enabled()
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    function_modes = _get_current_function_mode_stack()
    dispatch_modes = dispatch._get_current_dispatch_mode_stack()

    @contextmanager
    def carried() -> Iterator[None]:
        with ExitStack() as stack:
            if stream is not None:
                torch.cuda.set_device(device)
                torch.cuda.set_stream(stream)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            # Pushed and not entered: entering a mode once more would change what it keeps for the caller.
            for mode in function_modes:
                _push_mode(mode)
                stack.callback(_pop_mode)
            for mode in dispatch_modes:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode)
            yield

    return carried
