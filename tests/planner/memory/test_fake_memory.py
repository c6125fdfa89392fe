"""MemoryModel beside the memory that tensors take at the real widths of large models (tests/worlds/fake_memory.py): fake
tensors, which have no memory, and torch's MemTracker, which counts it.

test_memory_model.py measures small models with the allocator. Here nothing is small, but kernels have no scratch.
"""

import json
from dataclasses import asdict

import pytest

from tests.worlds.fake_memory import Case
from tests.worlds.launched import run

WITHIN = 0.08
"""Of what is counted, by what is measured."""
CASES = {
    "logits": Case("llama-8b", ranks=4, tokens=65536),
    "layers that keep all": Case("llama-8b", ranks=4, tokens=65536, checkpointing=False),
    "whole documents": Case("llama-8b", ranks=4, tokens=65536, whole=True),
    "heads split": Case("llama-70b", ranks=4, tokens=262144, ulysses=4),
    "offload": Case("llama-8b", ranks=4, tokens=262144, layers=3, keep_attention=True, offload=0.5),
    "last slice kept": Case("llama-8b", ranks=4, tokens=262144, layers=1, keep_attention=True, keep_last_slice=True),
    "experts": Case("mixtral-8x7b", ranks=4, tokens=65536, layers=4),
    "zero1": Case("llama-8b", ranks=4, tokens=65536, sharding="zero1"),
    "zero2": Case("llama-8b", ranks=4, tokens=65536, sharding="zero2"),
    "zero3": Case("llama-8b", ranks=4, tokens=65536, sharding="zero3"),
    "zero3, long": Case("llama-8b", ranks=4, tokens=262144, sharding="zero3"),
    "zero3, short": Case("llama-8b", ranks=8, tokens=32768, sharding="zero3"),
}


BY_NIGHT = ("whole documents", "last slice kept", "zero1", "zero2", "zero3, short")
"""Cases whose parts other cases have."""


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, starts_processes: None) -> dict[str, dict[str, dict[str, int]]]:
    """Return, of each case that this session asks for, what was measured and counted."""
    asked = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    ended = run("tests/worlds/fake_memory.py", *(json.dumps(asdict(CASES[name])) for name in asked))
    assert ended.code == 0, ended.output
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    return dict(zip(asked, lines, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in BY_NIGHT)) for name in CASES]
)
def test_tensors_take_what_is_counted(name: str, measured: dict[str, dict[str, dict[str, int]]]):
    peak, counted = measured[name]["peak"], sum(measured[name]["counted"].values())
    assert peak > 2**32, "nothing large was there"
    assert abs(counted / peak - 1) < WITHIN, measured[name]
