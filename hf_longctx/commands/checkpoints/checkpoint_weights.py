"""Weights of a checkpoint's folder, which are read one at a time. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WEIGHTS, INDEX, ADAPTER_WEIGHTS = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class CheckpointWeights:
    """Weights of a folder, read one at a time."""

    def __init__(self, source: Path, single: str = WEIGHTS) -> None:
        self._source = source
        self.files: Mapping[str, str] = self._locate(single)
        """name of a weight -> its file"""

    def _locate(self, single: str) -> dict[str, str]:
        from safetensors import safe_open

        if (self._source / single).is_file():
            with safe_open(self._source / single, "pt") as file:
                return dict.fromkeys(file.keys(), single)
        if single == WEIGHTS and (self._source / INDEX).is_file():
            weight_map = json.loads((self._source / INDEX).read_text(encoding="utf-8"))["weight_map"]
            if missing := sorted({name for name in weight_map.values() if not (self._source / name).is_file()}):
                raise ValueError(f"{self._source}: {INDEX} names {', '.join(missing)}, which are not there")
            return weight_map
        pickles = sorted(path.name for pattern in PICKLES for path in self._source.glob(pattern))
        others = f"only {', '.join(pickles)}, pickles, which are not read" if pickles else "none"
        raise ValueError(
            f"{self._source} holds no weights in safetensors ({single} or {INDEX}); of other kinds {others}"
        )

    def shapes(self) -> Iterator[tuple[str, Any]]:
        """Name and an empty tensor on the meta device, of each weight; a file's are read together."""
        import torch
        from safetensors import safe_open

        for name in dict.fromkeys(self.files.values()):
            with safe_open(self._source / name, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is no dictionary
                    part = file.get_slice(key)
                    shape = part.get_shape()
                    dtype = (part[:1] if shape else file.get_tensor(key)).dtype
                    yield key, torch.empty(shape, dtype=dtype, device="meta")

    def read(self, name: str) -> Any:
        """A tensor, of which nothing stays in memory but itself."""
        from safetensors import safe_open

        with safe_open(self._source / self.files[name], "pt") as file:
            return file.get_tensor(name)


def cast(name: str, weight: Any, dtype: Any) -> Any:
    """Return a weight in another dtype of numbers with a point; any other weight as it is. Raises ValueError where it holds
    numbers that the dtype does not reach."""
    if not weight.is_floating_point():
        return weight
    cast_weight = weight.to(dtype)
    if (beyond := _not_finite(cast_weight) - _not_finite(weight)) > 0:
        raise ValueError(
            f"{beyond} of {weight.numel()} numbers of {name} are larger than {dtype} holds. {advice(dtype)}"
        )
    return cast_weight


def refuse_not_finite(model: Any, name: str) -> None:
    """Raise ValueError where weights of a model that was loaded are no finite numbers. `name`: what the model is called."""
    for weight_name, weight in model.named_parameters():
        if count := _not_finite(weight):
            raise ValueError(
                f"{count} of {weight.numel()} numbers of {weight_name} of {name} are not finite in {weight.dtype}. "
                f"{advice(weight.dtype)}"
            )


def advice(dtype: Any) -> str:
    """Say what is valid where numbers of a model in this dtype are not finite."""
    wider = {"torch.float16": "bfloat16 or float32", "torch.bfloat16": "float32"}.get(str(dtype))
    if wider is not None:
        return f"Valid: --dtype {wider}, if they are finite there"
    return "Valid: another checkpoint, as no dtype makes numbers of what is none"


def _not_finite(weight: Any) -> int:
    """Count the numbers of a weight that are infinite or none. Of 8 bits, torch knows that of some kinds only; on meta, there are
    no numbers."""
    if weight.is_meta or not weight.is_floating_point() or weight.itemsize == 1:
        return 0
    return int((~weight.isfinite()).sum())
