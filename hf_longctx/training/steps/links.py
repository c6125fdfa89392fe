"""What a stage sends to the next one and gets back: activations forward, their gradients backward.

The devices of one pipeline form a ring: with virtual stages the last one sends to the first. Every edge of the ring has, in
each direction, a process group of its own, so that a send waits for nothing but the sends before it on the same way:

    device 0  --activations-->  device 1  --activations-->  device 2
              <--gradients----            <--gradients----

A receive is posted before its message is sent, and under NCCL it takes a multiprocessor for each channel until the message is
there: these groups have few (LINK_CHANNELS).

NCCL runs the operations of one communicator in order. So messages are received in the order in which they are sent, which
the receiver knows: both follow the plan (planner/stages.py). Shapes follow from layouts; nothing is negotiated.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx.attention.communicators import message_options
from hf_longctx.attention.groups import own_groups
from hf_longctx.attention.progress import Progress

LINK_CHANNELS = 4
"""Channels of a group of two stages: over a network, what a card's 50 GB/s take (hardware/nccl.py)."""


def link_options() -> Any:
    """Make NCCL's options of one way between two stages; None for other backends."""
    return message_options(LINK_CHANNELS, priority=False)


@dataclass(frozen=True)
class Message:
    """What the receiver must know of one."""

    name: tuple[Any, ...]
    """what it is, unique in a step on its way"""
    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """shape and dtype of each tensor"""


class Links:
    """The ways of this process to its neighbours. Made once, by all processes of the default group together.

    Args:
        pipelines: [pipeline][device]: global ranks. Each holds as many, and every rank is in one.
        ring: whether the last device sends to the first (virtual stages).
        timeout_seconds: how long a wait for a neighbour may take.
        progress: notes for whom this rank waits.
    """

    def __init__(
        self, pipelines: Sequence[Sequence[int]], *, ring: bool, timeout_seconds: float, progress: Progress
    ) -> None:
        me = dist.get_rank()
        self._devices = next(ranks for ranks in pipelines if me in ranks)
        self.device = self._devices.index(me)
        """this process's place in its pipeline"""
        self.devices = len(self._devices)
        self.bytes_sent = 0
        """so far (measured)"""
        self._progress = progress
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        self._expected: dict[tuple[int, bool], deque[Message]] = {}
        self._coming: dict[tuple[int, bool], tuple[Message, list[torch.Tensor], list[Any]]] = {}
        self._arrived: dict[tuple[int, bool, tuple[Any, ...]], list[torch.Tensor]] = {}
        limit = timedelta(seconds=timeout_seconds)
        edges = range(self.devices if ring and self.devices > 1 else self.devices - 1)
        ways = [
            (edge, backward) for edge in edges for backward in (False, True)
        ]  # an edge: from this device to the next
        ends = [{edge, (edge + 1) % self.devices} for edge, _ in ways]
        members = [sorted(ranks[end] for ranks in pipelines for end in edge_ends) for edge_ends in ends]
        own = own_groups(self, members, limit, options=link_options)
        self._groups = dict(zip((way for way, edge_ends in zip(ways, ends) if self.device in edge_ends), own))
        backend = dist.get_backend(next(iter(self._groups.values()))) if self._groups else "gloo"
        self.torch_device = torch.device("cpu" if backend == "gloo" else "cuda")
        """where tensors must be to be sent"""
        for way in self._groups:  # a communicator is made by the first message on it, and blocks until both are there
            self._greet(*way)

    def _greet(self, edge: int, backward: bool) -> None:
        peer, sends = self._peer(edge), (self.device == edge) != backward
        hello = torch.zeros(1, device=self.torch_device)
        work = (dist.isend if sends else dist.irecv)(hello, peer, self._groups[edge, backward])
        assert work is not None
        work.wait()

    def _peer(self, edge: int) -> int:
        """Global rank at the other end."""
        return self._devices[(edge + 1) % self.devices if self.device == edge else edge]

    def _edge(self, backward: bool, sending: bool) -> int:
        """Activations leave to the next device, and gradients to the one before."""
        return self.device if sending != backward else (self.device - 1) % self.devices

    def expect(self, messages: Iterable[Message], *, backward: bool) -> None:
        """Says what will come in this step: activations from the device before, or gradients from the next, in the order in
        which they are sent."""
        way = self._edge(backward, sending=False), backward
        if way in self._groups:
            self._expected[way] = deque(messages)
            self._let_come(way)

    def _let_come(self, way: tuple[int, bool]) -> None:
        """The next message may arrive while this process computes."""
        if not self._expected[way]:
            return
        message = self._expected[way].popleft()
        tensors = [torch.empty(shape, dtype=dtype, device=self.torch_device) for shape, dtype in message.parts]
        works = [dist.irecv(tensor, self._peer(way[0]), self._groups[way]) for tensor in tensors]
        self._coming[way] = message, tensors, works

    def send(self, tensors: Sequence[torch.Tensor], *, backward: bool) -> None:
        """Begins to send one message."""
        edge = self._edge(backward, sending=True)
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
        for tensor in tensors:
            tensor = tensor.contiguous()
            work = dist.isend(tensor, self._peer(edge), self._groups[edge, backward])
            self._in_flight.append((work, tensor))
            self.bytes_sent += tensor.nbytes

    def receive(self, name: tuple[Any, ...], *, backward: bool) -> list[torch.Tensor]:
        """Waits for one message; those that are sent before it are kept until they are asked for."""
        way = self._edge(backward, sending=False), backward
        while (*way, name) not in self._arrived:
            message, tensors, works = self._coming.pop(way)
            self._progress.wait_for([self._peer(way[0])], "gradients" if backward else "activations")
            for work in works:
                work.wait()
            self._progress.wait_for(())
            self._arrived[*way, message.name] = tensors
            self._let_come(way)
        return self._arrived.pop((*way, name))

    def finish(self) -> None:
        """At the end of a step: returns when everything that was sent has left."""
        assert not self._arrived, f"not asked for: {list(self._arrived)}"
        assert not self._coming, f"not asked for, and perhaps not sent: {list(self._coming)}"
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
