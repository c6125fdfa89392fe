"""Pages of plans for tests: plans of every planner, the page of them, opened in a browser."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hf_longctx.planner import PLANNERS, StepPlan, Topology
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.report.plans.plan_page import write_page
from tests.builders.plans.random_plans import GPU_COST, MISTRAL_7B, lognormal_pareto
from tests.worlds.browser import Opened, browser, open_page

in_a_browser = pytest.mark.browser
KV_BYTES = 131_072
MEMORY = MemoryModel.from_config(SimpleNamespace(**vars(MISTRAL_7B), tie_word_embeddings=False), checkpointing=True)

SIZES = {4: (40, 32_768), 64: (800, 300_000), 16_384: (100_000, 2_000_000)}
"""Ranks -> documents, and tokens of the longest."""


@cache
def plans_of(ranks: int, mode: str = "async") -> list[StepPlan]:
    """A plan of every planner that splits documents and packs them, ours first."""
    documents, longest = SIZES[ranks]
    lengths = np.append(lognormal_pareto(documents - 1, 0, longest), longest)
    topology = Topology(ranks, 8192, ranks_per_node=8)
    # Without splitting, long documents have no place; unpacked, 100,000 documents of a few ranks' tokens take 256 ranks each.
    names = ("hdp", *sorted(set(PLANNERS) - {"hdp", "dp_packing", "static_cp_unpacked"}))
    return [PLANNERS[name](lengths, topology, GPU_COST, mode) for name in names]


def lengths_of(plan: StepPlan) -> np.ndarray:
    lengths = np.zeros(len(plan.doc), np.int64)
    lengths[plan.doc] = plan.length
    return lengths


def write(plans: list[StepPlan], path: Path, **options) -> Path:
    write_page(plans, path, lengths=lengths_of(plans[0]), title="Step 7 of <a test>", **options)
    return path


def opened(plans: list[StepPlan], work: Path, probe: str = "", **options) -> Opened:
    """The page, opened; nothing may go wrong in it, and nothing may be loaded."""
    page = open_page(browser(), write(plans, work / "new" / "page.html", **options), work, probe)
    assert page.ready == "yes"
    assert page.console == []
    assert page.resources == []
    return page


def named_ns(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1}[unit]
