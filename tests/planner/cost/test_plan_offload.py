"""Offload that a plan asks for: documents on fewer ranks than hold them, and the same training."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_longctx import LongContextPlugin
from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.hardware.profile import Profile
from hf_longctx.planner import CPU_CORES, CostModel, Topology
from hf_longctx.planner.cost.adjustment import Adjustment
from hf_longctx.planner.cost.selective_offload import Offload
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import Run, documents, train
from tests.worlds.rank_pool import RankPool

CAPACITY = 64
LENGTHS = [80, 60, 55, 62, 48, 60, 58, 64, 61, 40]
"""Of both steps: one document that a rank cannot hold, and enough others that nobody waits for it."""
SLOW_LINKS = replace(CPU_CORES["amx"]["float32"], inside_bytes=1e6)
"""Exchanging costs more than anything else."""


def a_profile(path: Path, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "speed": SLOW_LINKS, "points": (), "predicted_seconds": (), "clock": "wall", "device": "some", "backend": "gloo",
        "world_size": 2, "ranks_per_node": 2, "threads": 1, "precision": "float32", "device_bytes": 2**30,
        "host_bytes": 2**32, "model": {}, "versions": {}, "host_bandwidth": 1e10,
    }  # fmt: skip
    Profile(**fields | changes).save(path)
    return str(path)


def run(output: str, plugin: dict[str, Any], **settings: Any) -> Run:
    capacity = CAPACITY if int(os.environ["WORLD_SIZE"]) > 1 else sum(LENGTHS)
    plugin = {"capacity": capacity, "global_batch_documents": len(LENGTHS)} | plugin
    model = tiny_llama(num_hidden_layers=6)
    return train(model, documents(LENGTHS), plugin, {"output_dir": output, "max_steps": 2} | settings, in_order=True)


@pytest.mark.parametrize(("sharding", "checkpointing"), [("ddp", False), ("zero1", True)])
def test_a_document_on_fewer_ranks_than_hold_it(
    ranks1: RankPool, ranks2: RankPool, tmp_path: Path, sharding: str, checkpointing: bool
):
    [expected] = ranks1.run(run, str(tmp_path), {})
    plugin = {"profile": a_profile(tmp_path / "profile.json"), "sharding": sharding}
    options = {"gradient_checkpointing": checkpointing}
    split = ranks2.run(run, str(tmp_path), plugin, **options)
    whole = ranks2.run(run, str(tmp_path), plugin | {"plan_offload": True}, **options)
    for trained in (*split, *whole):
        for name in ("loss", "grad_norm"):
            assert trained.series(name) == pytest.approx(expected.series(name), rel=1e-4)
    assert min(split[0].series("exchanged_mib")) > 0
    assert whole[0].series("exchanged_mib") == [0, 0], "the long document lies on one rank"
    assert min(whole[0].series("offloaded_tokens")) >= LENGTHS[0] - CAPACITY


def test_plans_without_it_where_ranks_are_unequal(tmp_path: Path):
    cost = CostModel.from_config(tiny_llama(num_hidden_layers=6).config, SLOW_LINKS)
    offload = Offload(share=600, transfer_ps=1, host_tokens=10**6)
    collator = LengthAwareCollator(Topology(2, CAPACITY), cost, offload=offload)
    assert collator.plan(np.array(LENGTHS)).summary().offloaded_tokens > 0
    unequal = Adjustment(speed=(1000, 800))
    assert collator.plan(np.array(LENGTHS), unequal).summary().offloaded_tokens == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"plan_offload: true needs longctx.profile, .*`hf-longctx profile`"),
        ({"profile": {}, "activation_offload": 0.5}, r"plan_offload: true and activation_offload \(0.5\) both say"),
        (
            {"profile": {}, "sharding": "zero3"},
            r"plan_offload: true with sharding 'zero3', whose steps are planned in rounds",
        ),
        ({"profile": {"host_bandwidth": 0.0}}, r"host_bandwidth is 0.0 in .*measure again with `hf-longctx profile`"),
    ],
)
def test_what_it_cannot_go_with(tmp_path: Path, settings: dict[str, Any], message: str):
    if "profile" in settings:
        settings = settings | {"profile": a_profile(tmp_path / "profile.json", **settings["profile"])}
    with pytest.raises(ValueError, match=message):
        LongContextPlugin(capacity=CAPACITY, plan_offload=True, **settings)
