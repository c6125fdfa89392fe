"""What all tests share: one thread, hypothesis profiles, and worlds of gloo ranks that live as long as the session.

Hypothesis draws the same examples in every run. `HYPOTHESIS_PROFILE=nightly` draws many more, and new ones each time.
"""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.rank_pool import RankPool

torch.set_num_threads(1)

# Distributed examples are slow to draw and to run beside a busy sibling: neither says anything about the code.
settings.register_profile(
    "quick", max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", parent=settings.get_profile("quick"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def ranks1() -> Iterator[RankPool]:
    """One rank: what `torch.distributed` code does in a world of one."""
    with closing(RankPool(1)) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two gloo ranks, shared by all tests of the session."""
    with closing(RankPool(2)) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four gloo ranks, shared by all tests of the session."""
    with closing(RankPool(4)) as pool:
        yield pool
