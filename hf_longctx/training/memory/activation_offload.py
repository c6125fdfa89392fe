"""Selective activation offload: a share of what layers keep for backward waits in host memory.

What autograd saves inside a layer comes by here (torch.autograd.graph.saved_tensors_hooks). Of each storage the first
bytes are copied to the host and the rest into a storage of its own, so that the whole one is free; in backward both
come together again, bit for bit. Working on storages and not on tensors, whatever is saved twice, or as several views,
moves once.

    forward    layer 1 .... layer 2 .... layer 3 .... layer 4                 compute stream
                         1 to host    2 to host    3 to host                  one stream down
    backward                          3 from host  2 from host  1 from host   one stream up
               layer 5 .... layer 4 .... layer 3 .... layer 2                 compute stream

On CUDA the copies run beside compute: what a layer sends to the host is free STASH_LAYERS layers later, for which compute
waits if it must, and backward of a layer starts the copy of the layer before it. On a CPU copies are made where they are
needed. The first and the last layer would have no time for it and keep all, as the planner counts.

Source: ByteScale (arXiv 2502.21231), section 5. Nothing is sent between ranks.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

PIECE_BYTES = 1 << 26
"""Pinned memory is torch's, which keeps what is freed for the next request, and rounds requests up to a power of two: so
large ones are made in pieces of one."""
STASH_LAYERS = 2
"""Layers whose copies to the host may be under way. The host prepares layers far ahead of the device: unless compute
waits, nothing would be free before the device has caught up, and the peak be that without offload."""
PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
"""Kinds of tensors that have a storage of their own, which may move."""


class HostMemory:
    """Moves what some layers of one model save to the host, and back."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        self.bytes_to_host = 0
        """Moved so far (measured, for reports and tests)."""
        self.bytes_to_device = 0
        self.ahead = 1 if cuda else 0
        """Layers that come back before they are needed."""
        self._down, self._up = (torch.cuda.Stream(self.device) if cuda else None for _ in range(2))
        self._splits: dict[int, list[weakref.ref[_Split]]] = {}
        self._stash: deque[tuple[int, torch.Tensor, torch.cuda.Event]] = deque()
        """(layer, storage, copied): what is on its way to the host, in order."""

    def layer(
        self, number: int, share: float, rows: Collection[int], excluded: Collection[torch.Tensor]
    ) -> "LayerHooks":
        """Return the hooks for the forward of one layer.

        Args:
            number: of the layer in one forward; backward goes through those of a forward in descending order.
            share: of each storage, from 0 to 1; 0 for a layer that keeps all.
            rows: numbers of rows that activations have (tokens): what has no dimension of such a size stays.
            excluded: tensors that belong to others (parameters, rotations), which stay too.
        """
        self._free_before(number - STASH_LAYERS + 1)
        return LayerHooks(self, number, share, rows, excluded)

    def forget(self) -> None:
        """Free what the layers of a micro-batch have left, at its end."""
        self._free_before(None)
        self._splits.clear()

    def split(self, number: int, whole: torch.Tensor, moved: int) -> "_Split":
        """Moves the first `moved` bytes of a layer's storage, uint8 [bytes], to the host."""
        split = _Split(self, number, whole, moved)
        if self.ahead:
            self._splits.setdefault(number, []).append(weakref.ref(split))
        return split

    def reach(self, number: int) -> None:
        """Backward is at this layer: starts what should be there soon."""
        self._free_before(None)
        for reference in self._splits.pop(number - self.ahead, ()) if self.ahead else ():
            if (split := reference()) is not None:
                split.fetch()

    def _free_before(self, number: int | None) -> None:
        """Let what layers before this one (None: all) have sent to the host be used for other things: what compute does from
        here on comes after those copies."""
        while self._stash and (number is None or self._stash[0][0] < number):
            torch.cuda.current_stream(self.device).wait_event(self._stash[0][2])
            self._stash.popleft()  # not before: its memory is the next request's

    def down(self, number: int, whole: torch.Tensor, host: list[torch.Tensor]) -> torch.cuda.Event | None:
        """Copies the first bytes of a layer's storage to the host; returns when that is done, None if it is."""
        self.bytes_to_host += sum(piece.nbytes for piece in host)
        if self._down is None:
            _copy(host, whole[: sum(map(len, host))].split(PIECE_BYTES))
            return None
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            _copy(host, whole[: sum(map(len, host))].split(PIECE_BYTES))
        copied = self._down.record_event()
        self._stash.append((number, whole, copied))
        return copied

    def up(
        self, host: list[torch.Tensor], whole: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copies them back; returns when that is done."""
        self.bytes_to_device += sum(piece.nbytes for piece in host)
        if self._up is None or after is None:
            _copy(whole[: sum(map(len, host))].split(PIECE_BYTES), host)
            return None
        # Memory that backward has just freed is used again here: what still computes with it comes first.
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        self._up.wait_event(after)
        with torch.cuda.stream(self._up):
            _copy(whole[: sum(map(len, host))].split(PIECE_BYTES), host)
        return self._up.record_event()


class _Split:
    """A storage whose first bytes are on the host."""

    def __init__(self, memory: HostMemory, number: int, whole: torch.Tensor, moved: int) -> None:
        self._memory = memory
        sizes = [min(PIECE_BYTES, moved - start) for start in range(0, moved, PIECE_BYTES)]
        self._host = [_host_bytes(size, pinned=memory.device.type == "cuda") for size in sizes]
        self._moved, self._rest = moved, whole[moved:].clone()
        self._there = memory.down(number, whole, self._host)
        self._whole: torch.Tensor | None = None
        self._back: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Brings the bytes back, unless they are."""
        if self._whole is not None:
            return
        self._whole = self._rest.new_empty(self._moved + len(self._rest))
        self._whole[self._moved :] = self._rest
        self._back = self._memory.up(self._host, self._whole, self._there)
        self._host, self._rest = [], self._rest[:0].clone()

    def whole(self) -> torch.Tensor:
        """All of the storage, uint8 [bytes], for the stream that asks."""
        self.fetch()
        if self._back is not None:
            torch.cuda.current_stream(self._memory.device).wait_event(self._back)
        assert self._whole is not None
        return self._whole


@dataclass(frozen=True)
class _Saved:
    """The object that autograd holds instead of a tensor."""

    number: int
    tensor: torch.Tensor
    """Itself, or an empty one of its dtype."""
    split: _Split | None = None
    geometry: tuple[Any, ...] = ()
    """Size, stride and offset in the storage."""


class LayerHooks(contextlib.AbstractContextManager[None]):
    """While active, what autograd saves is the layer's."""

    def __init__(
        self,
        memory: HostMemory,
        number: int,
        share: float,
        rows: Collection[int],
        excluded: Collection[torch.Tensor],
    ) -> None:
        self._memory, self._number, self._share, self._rows = memory, number, share, rows
        self._excluded = {StorageWeakRef(tensor.untyped_storage()) for tensor in excluded if _is_plain(tensor)}
        self._splits: dict[StorageWeakRef, weakref.ref[_Split]] = {}
        """By storage. The weak reference keeps another one from being taken for it: an address is used again, but not
        before the reference is gone."""
        self._active = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._active.enter_context(saved_tensors_hooks(self.put, self.get))

    def __exit__(self, *error: Any) -> None:
        self._active.close()
        self._excluded, self._splits = set(), {}

    def put(self, tensor: torch.Tensor) -> _Saved:
        """Takes a tensor that is to be saved."""
        split = self._split(tensor)
        if split is None:
            return _Saved(self._number, tensor.detach())  # an output itself would refer to what saves it
        geometry = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _Saved(self._number, tensor.new_empty(0), split, geometry)

    def get(self, saved: _Saved) -> torch.Tensor:
        """Gives it back."""
        self._memory.reach(saved.number)
        if saved.split is None:
            return saved.tensor
        return saved.split.whole().view(saved.tensor.dtype).as_strided(*saved.geometry)

    def _split(self, tensor: torch.Tensor) -> _Split | None:
        if not _is_plain(tensor) or tensor.device.type != self._memory.device.type:
            return None
        if not any(size in self._rows for size in tensor.shape):
            return None
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        moved = int(self._share * storage.nbytes())
        if moved == 0 or key in self._excluded or storage.nbytes() % tensor.element_size():
            return None
        split = self._splits[key]() if key in self._splits else None
        if split is None:
            split = self._memory.split(self._number, _bytes_of(tensor), moved)
            self._splits[key] = weakref.ref(split)
        return split


def _is_plain(tensor: torch.Tensor) -> bool:
    """Dense, with a storage of its own: a distributed tensor has none."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, which it may be a view of: uint8 [bytes]."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)


def _host_bytes(count: int, pinned: bool) -> torch.Tensor:
    """uint8 [count]. Where the device is a CPU too, memory of numpy's: torch's allocator then counts the device's."""
    return (
        torch.empty(count, dtype=torch.uint8, pin_memory=True)
        if pinned
        else torch.from_numpy(np.empty(count, np.uint8))
    )


def _copy(targets: Any, sources: Any) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source, non_blocking=True)
