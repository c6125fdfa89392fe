"""Tests of what only later releases of transformers can, of those that are supported."""

from collections.abc import Mapping
from importlib.metadata import version

import pytest

TRANSFORMERS = tuple(int(part) for part in version("transformers").split(".")[:2])
"""The installed release: (5, 23)."""
SPREADS_MODELS = TRANSFORMERS >= (5, 19)
"""Whether its Trainer knows of models that were loaded in stages, or sharded; before, the package refuses them."""

READS_GGUF = TRANSFORMERS >= (5, 23)
"""Whether it reads a tokenizer that begins texts with a token back from a GGUF file as it was; before, the package refuses to
write such files, and before 5.18 any."""


def skip_unless_loaded(mesh: Mapping[str, int]) -> None:
    """Skip a test of a mesh (fields of DistributedConfig) that the installed transformers refuses to load, or loads wrongly."""
    experts = mesh.get("ep_size", 1)
    first = (5, 19) if experts in (1, mesh.get("tp_size", 1)) else (5, 20)
    if first > TRANSFORMERS:
        pytest.skip(
            f"transformers {version('transformers')} cannot load {dict(mesh)}; {first[0]}.{first[1]} and later can"
        )
