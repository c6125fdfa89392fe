"""Traces: every micro-batch on every rank is a slice at its time, and arrows lead through the ranks that share documents."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.planner import PLANNERS, Topology, plan_step
from hf_longctx.planner.plan import MODES
from hf_longctx.planner.topology import SPLIT
from hf_longctx.report.plans.trace import write_trace, written_ranks
from tests.builders.plans.mixed_plan import mixed_plan
from tests.builders.plans.random_plans import GPU_COST, lognormal_pareto, steps


def events_of(plan, path: Path, **options) -> dict[str, list[dict]]:
    """Phase -> events, in the order of the file."""
    write_trace(plan, path, **options)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    by_phase = defaultdict(list)
    for event in json.loads(content)["traceEvents"]:
        by_phase[event["ph"]].append(event)
    assert set(by_phase) <= {"M", "X", "s", "t", "f"}
    return by_phase


@given(step=steps(), mode=st.sampled_from(MODES))
def test_slices_are_what_ranks_run_when_they_run_it(step, mode, tmp_path_factory):
    lengths, topology, cost = step
    plan = plan_step(lengths, topology, cost, mode)
    events = events_of(plan, tmp_path_factory.mktemp("trace") / "plan.json")
    timeline, node = plan.timeline(), topology.node_size
    named = {event["tid"]: event["args"]["name"] for event in events["M"] if event["name"] == "thread_name"}
    nodes = {event["pid"]: event["args"]["name"] for event in events["M"] if event["name"] == "process_name"}
    for rank in range(plan.world_size):
        mine = [slice_ for slice_ in events["X"] if named[slice_["tid"]] == f"rank {rank}"]
        tokens_of: dict[int, int] = {}  # micro-batch -> tokens, of all of its chunks
        for i, layout in plan.layouts(rank):
            tokens_of[i] = tokens_of.get(i, 0) + layout.tokens(rank)
        assert [slice_["args"]["micro_batch"] for slice_ in mine] == list(tokens_of)
        for slice_, (i, tokens) in zip(mine, tokens_of.items()):
            assert nodes[slice_["pid"]] == f"node {rank // node}"
            assert slice_["ts"] == pytest.approx(timeline.start[i] / 1e3)
            assert slice_["dur"] == pytest.approx(int(plan.cost[i]) / 1e3)
            assert slice_["args"]["tokens_on_this_rank"] == tokens
            assert slice_["args"]["ranks"] == plan.members[i]
            assert slice_["args"]["predicted_ms"] == plan.cost[i] / 1e6
    assert len(events["X"]) == len(plan.rank)


@given(step=steps())
def test_arrows_lead_through_the_ranks_of_a_shared_document_within_their_slices(step, tmp_path_factory):
    plan = plan_step(*step)
    events = events_of(plan, tmp_path_factory.mktemp("trace") / "plan.json")
    flows = defaultdict(list)
    for event in [*events["s"], *events["t"], *events["f"]]:
        flows[event["id"]].append(event)
    shared = plan.micro_batch_of_document[(plan.holder == SPLIT) & (plan.ranks_of_document > 1)]
    assert set(flows) == set(shared.tolist())
    for i, flow in flows.items():
        flow.sort(key=lambda event: event["ts"])
        assert [event["tid"] - 1 for event in flow] == plan.rank[
            plan.first_member[i] : plan.first_member[i + 1]
        ].tolist()
        assert [event["ph"] for event in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        assert all(event.get("bp") == "e" for event in flow[1:])
        slices = {slice_["tid"]: slice_ for slice_ in events["X"] if slice_["args"]["micro_batch"] == i}
        for event in flow:
            slice_ = slices[event["tid"]]
            assert event["pid"] == slice_["pid"]
            assert slice_["ts"] <= event["ts"] <= slice_["ts"] + slice_["dur"]


def test_slices_name_split_and_whole_documents(tmp_path):
    slices = events_of(mixed_plan(), tmp_path / "plan.json")["X"]
    assert [slice_["name"] for slice_ in slices[:4]] == ["20 tokens over 3 ranks"] * 3 + ["5 tokens"]
    assert slices[0]["args"] | {"micro_batch": 0} == slices[0]["args"]
    assert (slices[0]["args"]["split_documents"], slices[0]["args"]["whole_documents"]) == ("0 (20)", "1 (30)")
    assert "whole_documents" not in slices[1]["args"]
    assert slices[5]["name"] == "2 documents, 26 tokens over 4 ranks"
    assert slices[5]["args"]["offload_per_mille"] == 500


def test_many_documents_of_a_slice_are_counted(tmp_path):
    plan = plan_step(np.full(50, 2), Topology(1, 1000), GPU_COST)
    (slice_,) = events_of(plan, tmp_path / "plan.json")["X"]
    assert slice_["name"] == "50 documents, 100 tokens"
    assert slice_["args"]["whole_documents"].endswith("19 (2), and 30 more")


def test_a_compressed_trace_is_the_same_and_its_bytes_repeat(tmp_path):
    plan = mixed_plan()
    plain, packed = events_of(plan, tmp_path / "new" / "plan.json"), events_of(plan, tmp_path / "plan.json.gz")
    assert plain == packed
    once = (tmp_path / "plan.json.gz").read_bytes()
    write_trace(plan, tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == once


def test_a_large_plan_is_written_in_part_by_whole_nodes(tmp_path):
    lengths = lognormal_pareto(20_000, 0, 2_000_000)
    plan = PLANNERS["hdp"](lengths, Topology(4096, 8192, ranks_per_node=8), GPU_COST, "async")
    events = events_of(plan, tmp_path / "plan.json", most_ranks=64)
    ranks = {slice_["tid"] - 1 for slice_ in events["X"]}
    assert ranks <= set(written_ranks(4096, 8, 64).tolist())
    assert len({event["tid"] for event in events["M"]}) == 64
    assert {rank // 8 for rank in ranks} >= {0, 511}
    assert len(events["X"]) == np.isin(plan.rank, list(ranks)).sum()


@given(world_size=st.integers(1, 300), node=st.integers(1, 300), most=st.integers(1, 64))
def test_written_ranks_are_runs_of_neighbours_and_no_more_than_asked_for(world_size, node, most):
    ranks = written_ranks(world_size, min(node, world_size), most)
    assert 1 <= len(ranks) <= most
    assert (np.diff(ranks) > 0).all()
    assert ranks[0] == 0
    assert ranks[-1] < world_size
    if world_size <= most:
        assert len(ranks) == world_size


def test_a_simulated_run_gives_the_times(tmp_path):
    plan = mixed_plan()
    run = SimpleNamespace(start=np.array([0.0, 1.0, 2.5]), stop=np.array([1.0, 1.5, 3.0]))
    slices = events_of(plan, tmp_path / "plan.json", run=run)["X"]
    assert {(slice_["args"]["micro_batch"], slice_["ts"], slice_["dur"]) for slice_ in slices} == {
        (0, 0.0, 1e6),
        (1, 1e6, 0.5e6),
        (2, 2.5e6, 0.5e6),
    }
    with pytest.raises(ValueError, match="this plan has 3 micro-batches"):
        write_trace(plan, tmp_path / "none.json", run=SimpleNamespace(start=[0], stop=[1]))
    with pytest.raises(ValueError, match="most_ranks=0 must be at least 1"):
        write_trace(plan, tmp_path / "none.json", most_ranks=0)
