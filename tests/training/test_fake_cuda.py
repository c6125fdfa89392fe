"""Planned steps at the real widths of large models on a GPU that is not there (fake_cuda/): what makes the host wait for the
device, whether every tensor is where the operation that takes it runs, and whether streams are in order.

Nothing may make the host wait inside a step: it prepares the next layers while the device computes these. The wide matrix is
`python benchmarks/fake_cuda.py --check host-waits`.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.worlds.fake_cuda.cases import Case
from tests.worlds.launched import run

HOOKS_DO_NOT_BUILD: dict[str, str] = {}
"""Minor version of torch -> what of its C++ interface has changed. Elsewhere hooks.cpp has to build: without them nothing here
is tested."""
ALLOWED_WAITS: dict[str, int] = {}
"""Host waits of a step that are meant to be: none, inside layers or between them."""

CASES = {
    "offload": Case(
        "llama-8b", ranks=16, capacity=16384, longest=65536, offload=0.5, keep_last_slice=True, documents=2
    ),
    "ulysses": Case("llama-70b", ranks=64, capacity=16384, longest=524288, ulysses=8, layers=2),
    "experts": Case("mixtral-8x7b", ranks=16, capacity=16384, longest=65536, layers=2, documents=2),
    "million": Case("llama-8b", ranks=16, capacity=65536, longest=1_000_000, layers=2),
    "zero1": Case("llama-8b", ranks=16, capacity=16384, longest=65536, sharding="zero1", layers=2, documents=2),
    "zero3": Case("llama-8b", ranks=8, capacity=16384, longest=65536, sharding="zero3", layers=2, documents=1),
}
SPLIT = {"capacity": 8192, "offload": 0.5, "documents": 1}
RACED = {
    "raced direct": Case("llama-8b", ranks=4, ranks_per_node=2, longest=16384, layers=4, **SPLIT),
    "raced ulysses": Case(
        "llama-8b", ranks=8, ranks_per_node=2, longest=60000, ulysses=4, keep_last_slice=True, **SPLIT
    ),
}
BY_NIGHT = ("million", "zero1", "raced ulysses")
"""Cases whose parts other cases have."""
CONTROLS = ("waiting for messages", "waiting for copies to the host", "waiting for copies from the host")


def by_day(names: Iterable[str]) -> list[Any]:
    """Mark what runs by night."""
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in BY_NIGHT)) for name in names]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, starts_processes: None) -> dict[str, Any]:
    """Return what was seen of planted faults, of each case, and with each control: one process for all, because torch looks for
    hooks once."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release in HOOKS_DO_NOT_BUILD:
        pytest.xfail(f"hooks.cpp does not build with torch {release}: {HOOKS_DO_NOT_BUILD[release]}")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params.get("name") for item in here}
    asked: dict[str, dict[str, Any]] = {name: {"case": asdict(case)} for name, case in CASES.items() if name in names}
    asked |= {name: {"case": asdict(case), "without": None} for name, case in RACED.items() if name in names}
    asked |= {control: {"case": asdict(RACED["raced direct"]), "without": control} for control in CONTROLS}
    ended = run("-W", "ignore", "-m", "tests.worlds.fake_cuda", *map(json.dumps, asked.values()), fresh=True)
    assert ended.code == 0, ended.output
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    return dict(zip(("planted", *asked), lines, strict=True))


def test_planted_waits_and_mix_ups_are_seen(seen: dict[str, Any]):
    """Two blocking copies to the device, one of pageable memory, two copies back, three calls that wait, two questions about
    values, and two operations with a tensor of the host."""
    assert seen["planted"] == {
        "waits": {
            "host to device, blocking": 2,
            "host to device, not pinned": 1,
            "device to host, blocking": 1,
            "device to host, not pinned": 1,
            "torch.cuda.synchronize": 1,
            "Stream.synchronize": 1,
            "Event.synchronize": 1,
        },
        "copies": {"host to device": 2},
        "refused": {
            "DataDependentOutputException": 1,
            "DynamicOutputShapeException": 1,
            "two devices": 2,
        },
    }


@pytest.mark.parametrize("name", by_day(CASES))
def test_a_planned_step_never_makes_the_host_wait(name: str, seen: dict[str, Any]):
    case, step = CASES[name], seen[name]
    assert step["waits"] == ALLOWED_WAITS
    assert step["copies"]["host to device"] > step["micro_batches"], "tokens, positions and sequences travelled"
    assert step["split"] > 0, "no document of this rank lies on several"
    assert step["sent"] > 0
    forward, backward = (step["kernels"][f"_flash_attention_{direction}"] for direction in ("forward", "backward"))
    assert min(forward, backward) >= case.layers * step["micro_batches"]
    assert (step["offloaded"] > 0) == (case.offload > 0)


@pytest.mark.parametrize("name", by_day(RACED))
def test_streams_are_in_order_and_no_memory_is_freed_early(name: str, seen: dict[str, Any]):
    """Nor does anything need NCCL to tell the allocator of its tensors."""
    step = seen[name]
    assert step["faults"] == {}
    assert step["communicators"] == 3, "inside a node, and of keys and values and of gradients between nodes"
    assert step["accesses"] > 1000
    assert step["offloaded"] > 0


@pytest.mark.parametrize(
    ("control", "kinds"), zip(CONTROLS, [{"race"}, {"early free"}, {"race", "early free"}]), ids=CONTROLS
)
def test_order_that_is_taken_away_is_missed(control: str, kinds: set[str], seen: dict[str, Any]):
    assert {fault.partition(" of ")[0] for fault in seen[control]["faults"]} == kinds
