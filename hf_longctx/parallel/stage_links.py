"""Messages between a stage and the next one: activations forward, their gradients backward.

The devices of one pipeline form a ring: with virtual stages the last one sends to the first. Every edge of the ring has, in
each direction, a process group of its own, so that a send waits for nothing but the sends before it on the same way:

    device 0  --activations-->  device 1  --activations-->  device 2
              <--gradients----            <--gradients----

A receive is posted as soon as the one before it has arrived, before its message is sent, and under NCCL it takes a
multiprocessor for each channel until the message is there: these groups have few (LINK_CHANNELS). A device that runs one kernel
of NCCL's at a time would then wait for ever: for gradients that follow from activations which it has yet to send. There
(settings/gpu_environment.py), messages are received in the one order of all tasks, in which they are sent too:

    key of a message: (place of the task that sends it, 1)        keys of a task's own exchange: (its place, 0)

A device receives what has a lesser key before it runs a task. So of all messages that are under way the one with the least key
has both of its ends at it, and tests/worlds/replay.py plays that. What comes while such a device is busy travels when it is done.

NCCL runs the operations of one communicator in order. So messages are received in the order in which they are sent, which
the receiver knows: both follow the plan (planner/stages/stage_order.py). Shapes follow from layouts; nothing is negotiated.
"""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx.attention.communicators import message_options
from hf_longctx.attention.groups import own_groups
from hf_longctx.settings.gpu_environment import OVERLAPPING_DRIVER, cuda_driver, kernels_one_at_a_time
from hf_longctx.supervision.progress import Progress

LINK_CHANNELS = 4
"""Channels of a group of two stages: over a network, what a card's 50 GB/s take (hardware/nccl.py)."""


def link_options() -> Any:
    """Make NCCL's options of one way between two stages; None for other backends."""
    return message_options(LINK_CHANNELS, priority=False)


@dataclass(frozen=True)
class Message:
    """Name, shapes and place of a message, which its receiver must know."""

    name: tuple[Any, ...]
    """what it is, unique in a step on its way"""
    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """shape and dtype of each tensor"""
    place: int
    """of the task that sends it, in the one order of the tasks of all devices and ranks"""


Way = tuple[int, bool]
"""An edge, numbered by the device before it, and whether gradients travel it: backward."""


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
        devices = next(ranks for ranks in pipelines if me in ranks)
        driver = cuda_driver()
        in_order = kernels_one_at_a_time(os.environ, OVERLAPPING_DRIVER if driver is None else driver)
        own_ways = self._take_place(devices, devices.index(me), ring, in_order, progress)
        limit = timedelta(seconds=timeout_seconds)
        members = [sorted(ranks[end] for ranks in pipelines for end in self._ends(edge)) for edge, _ in self._ways]
        own = own_groups(self, members, limit, options=link_options)
        self._groups = dict(zip(own_ways, own))
        backend = dist.get_backend(next(iter(self._groups.values()))) if self._groups else "gloo"
        self.torch_device = torch.device("cpu" if backend == "gloo" else "cuda")
        for way in own_ways:  # a communicator is made by the first message on it, and blocks until both are there
            self._begin((self.device == way[0]) != way[1], torch.zeros(1, device=self.torch_device), way).wait()

    def _take_place(
        self, devices: Sequence[int], device: int, ring: bool, in_order: bool, progress: Progress
    ) -> list[Way]:
        """Set what does not depend on how messages travel; returns the ways of this process. `in_order`: whether messages are
        received in the one order of all tasks."""
        self._devices, self._in_order, self._progress = devices, in_order, progress
        self.device = device
        """this process's place in its pipeline"""
        self.devices = len(devices)
        self.bytes_sent = 0
        """so far (measured)"""
        self.torch_device = torch.device("cpu")
        """where tensors must be to be sent"""
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        self._expected: dict[Way, deque[Message]] = {}
        self._coming: dict[Way, deque[tuple[Message, list[torch.Tensor], list[Any]]]] = {}
        self._arrived: dict[tuple[int, bool, tuple[Any, ...]], list[torch.Tensor]] = {}
        edges = range(self.devices if ring and self.devices > 1 else self.devices - 1)
        self._ways: list[Way] = [(edge, backward) for edge in edges for backward in (False, True)]
        return [way for way in self._ways if device in self._ends(way[0])]

    def _ends(self, edge: int) -> set[int]:
        """Devices at the ends of an edge, which leads from one to the next."""
        return {edge, (edge + 1) % self.devices}

    def _begin(self, sends: bool, tensor: torch.Tensor, way: Way) -> Any:
        """Begin to send or receive one tensor; returns the work to wait for."""
        return (dist.isend if sends else dist.irecv)(tensor, self._peer(way[0]), self._groups[way])

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
        if way in self._ways:
            self._expected[way], self._coming[way] = deque(messages), deque()
            if not self._in_order:
                self._let_come(way)

    def reach(self, place: int) -> None:
        """Receive all messages that must arrive before the task of this place."""
        while self._in_order:
            ways = [way for way, messages in self._expected.items() if messages and messages[0].place < place]
            if not ways:
                return
            self._let_come(min(ways, key=lambda way: self._expected[way][0].place))

    def _let_come(self, way: Way) -> None:
        """The next message may arrive while this process computes."""
        if not self._expected[way]:
            return
        message = self._expected[way].popleft()
        tensors = [torch.empty(shape, dtype=dtype, device=self.torch_device) for shape, dtype in message.parts]
        works = [self._begin(False, tensor, way) for tensor in tensors]
        self._coming[way].append((message, tensors, works))

    def send(self, tensors: Sequence[torch.Tensor], *, backward: bool) -> None:
        """Begins to send one message."""
        edge = self._edge(backward, sending=True)
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
        for tensor in tensors:
            tensor = tensor.contiguous()
            self._in_flight.append((self._begin(True, tensor, (edge, backward)), tensor))
            self.bytes_sent += tensor.nbytes

    def receive(self, name: tuple[Any, ...], *, backward: bool) -> list[torch.Tensor]:
        """Waits for one message; those that are sent before it are kept until they are asked for."""
        way = self._edge(backward, sending=False), backward
        while (*way, name) not in self._arrived:
            message, tensors, works = self._coming[way].popleft()
            self._progress.wait_for([self._peer(way[0])], "gradients" if backward else "activations")
            for work in works:
                work.wait()
            self._progress.wait_for(())
            self._arrived[*way, message.name] = tensors
            if not self._in_order:
                self._let_come(way)
        return self._arrived.pop((*way, name))

    def finish(self) -> None:
        """Wait, at the end of a step, until everything that was sent has left."""
        assert not self._arrived, f"not asked for: {list(self._arrived)}"
        unasked = [way for way, coming in self._coming.items() if coming]
        assert not unasked, f"not asked for, and perhaps not sent: {unasked}"
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
