"""Reading a checkpoint on any number of ranks: each reads the boxes that it holds now, from wherever they were written.

Nothing is sent: files are mapped into memory, and only what is asked for is read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_longctx.checkpoint.boxes import Box, cuts, views
from hf_longctx.checkpoint.folder import RANDOM, CheckpointError, Manifest, Part, TensorEntry, state_file


class CheckpointReader:
    """A checkpoint that was found to be valid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._files: dict[str, Any] = {}

    def read_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives weights the checkpoint's values, in place.

        Raises:
            CheckpointError: other names, shapes or dtypes than the checkpoint's.
        """
        saved = self.manifest.weights
        if saved.keys() != weights.keys():
            missing, unknown = sorted(weights.keys() - saved.keys()), sorted(saved.keys() - weights.keys())
            raise CheckpointError(
                f"{self.folder} holds {len(saved)} weights, and the model trains or holds {len(weights)}: it lacks "
                f"{some(missing)} and has {some(unknown)} that the model has not. Give the model that it was made of"
            )
        with torch.no_grad():
            for name, tensor in weights.items():
                self._read(name, saved[name], tensor)

    def read_state(self, key: str, entry: TensorEntry, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the optimizer's state: in parts as the weight `like` where it has that shape, else whole."""
        dtype = _dtype(entry)
        if entry.shape == tuple(like.shape):
            state = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            if len(entry.parts) != 1 or entry.parts[0].shape != entry.shape:
                raise CheckpointError(
                    f"{self.folder}: {key} has shape {list(entry.shape)} in {len(entry.parts)} parts, and its weight has "
                    f"{list(like.shape)}"
                )
            self._check_file_holds(entry)
            state = torch.empty(entry.shape, dtype=dtype)
        self._read(key, entry, state)
        return state

    def random_state(self, rank: int) -> bytes | None:
        """Return what the rank of this number had; None where the checkpoint was made by fewer."""
        name = state_file(rank, self.manifest.world_size)
        if name not in self.manifest.files:
            return None
        return bytes(self._open(name).get_tensor(RANDOM).numpy())

    def _read(self, name: str, entry: TensorEntry, into: torch.Tensor) -> None:
        if entry.shape != tuple(into.shape) or _dtype(entry) != into.dtype:
            widened = (
                ". Under autocast, sharding zero1, zero2 and zero3 make float32 of half-precision weights that are trained, and "
                "ddp does not: such a run keeps to the one or the other"
            )
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(entry.shape)} and dtype {entry.dtype}, and the model's has "
                f"{list(into.shape)} and {into.dtype}. Give the model, or the adapter, that was trained, in its dtype"
                f"{widened if _dtype(entry) != into.dtype else ''}"
            )
        for box, view in views(into, cuts(into)):
            elements = 0
            for part in entry.parts:
                part_box = Box(part.offset, part.shape)
                common = box.common(part_box) if len(part.offset) == len(part.shape) == into.ndim else None
                if common is None:
                    continue
                part_of_file = self._part(part)
                if tuple(part_of_file.get_shape()) != part.shape:
                    raise CheckpointError(
                        f"{self.folder / part.file}: {part.key} has shape {part_of_file.get_shape()}, and the manifest says "
                        f"{list(part.shape)}"
                    )
                if into.ndim:
                    view[common.within(box).slices] = part_of_file[common.within(part_box).slices]
                else:
                    view.copy_(self._open(part.file).get_tensor(part.key))
                elements += common.elements
            if elements != box.elements:
                raise CheckpointError(
                    f"{self.folder}: the parts of {name} hold {elements} of the {box.elements} elements at "
                    f"{box.offset}, {box.shape}"
                )

    def _check_file_holds(self, entry: TensorEntry) -> None:
        """Refuse an entry of another shape than the file, before memory is taken for what only the manifest speaks of."""
        [part] = entry.parts
        shape = tuple(self._part(part).get_shape())
        if shape != entry.shape:
            raise CheckpointError(f"{self.folder / part.file}: {part.key} has shape {shape}, not {list(entry.shape)}")

    def _part(self, part: Part) -> Any:
        try:
            return self._open(part.file).get_slice(part.key)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / part.file} cannot be read: {error}") from None

    def _open(self, name: str) -> Any:
        if name not in self._files:
            if name not in self.manifest.files:
                raise CheckpointError(f"{self.folder}: {name} is named by a tensor, and not among the manifest's files")
            try:
                self._files[name] = safe_open(self.folder / name, "pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / name} cannot be read: {error}") from None
        return self._files[name]


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{entry.dtype!r} is no dtype of torch")
    return dtype


def some(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
