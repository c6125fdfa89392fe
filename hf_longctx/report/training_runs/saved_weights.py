"""A hash by which the weights in a folder are told from others, whatever their files are called elsewhere and dated.

evaluation.json keeps that of the model that was evaluated, and a report of a run shows results of the run's own weights alone.
It is of the names, dtypes and shapes of all weights, and of the beginning of each: training changes every weight that it trains,
and reading a model of hundreds of gigabytes takes no longer than reading a small one. Nothing is sent.
"""

import hashlib
import json
from pathlib import Path

NAMES = ("model*.safetensors", "adapter_model*.safetensors")
"""Names of the files of weights that transformers and PEFT save."""
SAMPLED_BYTES = 4096
"""Bytes of each weight that are hashed, from its first."""
LENGTH_BYTES = 8
"""Bytes at the beginning of a file that say how long its header is."""


def weights_hash(folder: Path) -> str | None:
    """Hash the weights in a folder; None: it holds none in safetensors, or they cannot be read."""
    weights: dict[str, str] = {}
    try:
        for path in sorted(path for pattern in NAMES for path in folder.glob(pattern)):
            weights |= _sampled(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return hashlib.sha256(json.dumps(sorted(weights.items())).encode()).hexdigest() if weights else None


def _sampled(path: Path) -> dict[str, str]:
    """Return name -> dtype, shape, and hash of the beginning of each weight in a file."""
    weights = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is cut off, or no file of safetensors")
        header = json.loads(file.read(length))
        for name, weight in header.items():
            if name == "__metadata__":
                continue
            begin, end = weight["data_offsets"]
            file.seek(LENGTH_BYTES + length + begin)
            sample = file.read(min(SAMPLED_BYTES, end - begin))
            weights[name] = f"{weight['dtype']} {weight['shape']} {hashlib.sha256(sample).hexdigest()}"
    return weights
