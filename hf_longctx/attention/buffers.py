"""Memory that messages leave from and arrive in, made once and used again.

On a GPU an operation of NCCL between two ranks notes with torch's allocator that its tensors are used on a stream of the
communicator's own (record_stream), and then their memory is free again only once the *device* has come there. The host prepares
whole layers ahead of the device, so that fresh tensors for each round would pile up: an exchange keeps its buffers instead.

Used again at once, as the host sees it: a batch of messages begins after all that the compute stream was given before it, and
whoever computes with what came, or writes to what was sent, waits for the batch first. So a piece may be taken again as soon as
its last use has been *issued*. Between two passes over a layout all pieces are free, so that each pass of a schedule can have the
same ones for the same messages in every layer (prepared_rounds.py).
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

Prepared = TypeVar("Prepared")


@dataclass(eq=False)
class Buffers:
    """Pieces of memory of one exchange, by number."""

    made: int = 0
    """Pieces made so far."""
    _pieces: dict[tuple[torch.dtype, torch.device], list[torch.Tensor | None]] = field(default_factory=dict)
    _prepared: WeakKeyDictionary[Any, dict[Hashable, Any]] = field(default_factory=WeakKeyDictionary)
    """Schedule -> what was prepared for it, by name. It refers to pieces, and is gone with its schedule."""

    def piece(self, number: int, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give the piece of a number, flat, whose values are any. One that has fewer elements is replaced: then all that was
        prepared before is forgotten, since views and operations would keep its memory."""
        pieces = self._pieces.setdefault((dtype, device), [])
        pieces += [None] * (number + 1 - len(pieces))
        piece = pieces[number]
        if piece is None or len(piece) < elements:
            if piece is not None:
                self._prepared.clear()
            piece = pieces[number] = None  # its memory is free before the larger one is made
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
                piece = pieces[number] = torch.empty(elements, dtype=dtype, device=device)
            self.made += 1
        return piece

    def forget(self) -> None:
        """Use no piece again: an error has left messages under way, which keep what is theirs."""
        self._pieces.clear()
        self._prepared.clear()

    def prepared(self, schedule: Any, name: Hashable, make: Callable[[], Prepared]) -> Prepared:
        """Give what `make` returns, made once as long as the schedule lives and pieces suffice."""
        of_schedule = self._prepared.get(schedule)
        if of_schedule is None or name not in of_schedule:
            made = make()  # which may forget all others
            of_schedule = self._prepared.setdefault(schedule, {})
            of_schedule[name] = made
        return of_schedule[name]
