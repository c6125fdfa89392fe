"""What pages and pictures are drawn from: numbers of single ranks, packed columns, pixels, and times."""

import base64
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.layouts.exchange_schedule import schedule
from hf_longctx.layouts.layout import Layout
from hf_longctx.planner import PLANNERS, StepPlan, Topology, plan_step
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.report.pictures.canvas import short_bytes
from hf_longctx.report.pictures.raster import covered
from hf_longctx.report.plans.rank_load import members_of_whole, over_ranks, peak_parts, received_tokens
from hf_longctx.report.plans.timeline_columns import packed, timeline_columns, timelines_within
from hf_longctx.report.training_runs.times import Times
from tests.builders.plans.mixed_plan import mixed_plan
from tests.builders.plans.random_plans import GPU_COST, MISTRAL_7B, lognormal_pareto, steps


@given(step=steps())
def test_received_tokens_are_those_of_the_schedules(step):
    plan = plan_step(*step)
    received = np.zeros(plan.world_size)
    for rank in range(plan.world_size):
        for _, layout in plan.layouts(rank):
            rounds = schedule(Layout(layout.shards), rank).rounds
            received[rank] += sum(receive.tokens for one_round in rounds for receive in one_round.receives)
    np.testing.assert_array_equal(received_tokens(plan), received)


def test_several_documents_that_ranks_share_are_received_to_within_a_token_each():
    plan = mixed_plan()
    for rank in range(4):
        received = sum(
            receive.tokens
            for _, layout in plan.layouts(rank)
            for one_round in schedule(layout, rank).rounds
            for receive in one_round.receives
        )
        assert abs(received_tokens(plan)[rank] - received) <= 2


def test_around_a_ring_everything_reaches_everybody():
    lengths = lognormal_pareto(200, 0, 200_000)
    plan = PLANNERS["static_cp"](lengths, Topology(64, 32768), GPU_COST, "async")
    assert received_tokens(plan).sum() == plan.summary().exchanged_tokens


def test_whole_documents_are_found_where_they_lie():
    plan = mixed_plan()
    whole, member = members_of_whole(plan)
    assert plan.doc[whole].tolist() == [1, 2, 3]
    assert plan.rank[member].tolist() == [0, 2, 3]
    assert member.tolist() == [0, 3, 4]


def test_bins_keep_the_highest_and_the_mean():
    bins = over_ranks(np.array([3, 1, 2, 6, 5]), 3)
    assert [bins.first.tolist(), bins.last.tolist()] == [[0, 2, 4], [1, 3, 4]]
    assert [bins.most.tolist(), bins.mean.tolist()] == [[3, 6, 5], [2.0, 4.0, 5.0]]


def test_memory_is_that_of_the_worst_member_offload_included():
    model = MemoryModel.from_config(SimpleNamespace(**vars(MISTRAL_7B), tie_word_embeddings=False))
    plan = mixed_plan()
    parts = peak_parts(plan, model, over_ranks(plan.peak_tokens, 4))
    members = list(zip(plan.rank, plan.member_tokens, np.repeat(plan.offload, plan.members)))
    for rank, bytes_of in enumerate(parts):
        assert sum(bytes_of.values()) == max(model.peak(int(t), int(o)) for r, t, o in members if r == rank)


def unpacked(columns: dict) -> dict[str, np.ndarray]:
    """Return columns as page/columns.js reads them."""
    planes, at, arrays = zlib.decompress(base64.b64decode(columns["data"])), 0, {}
    for name, count, width in columns["fields"]:
        arrays[name] = np.zeros(count, np.int64)
        for byte in range(width):
            arrays[name] |= np.frombuffer(planes, np.uint8, count, at).astype(np.int64) << (8 * byte)
            at += count
    assert at == len(planes)
    return arrays


@given(columns=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), min_size=1, max_size=4))
def test_packed_columns_are_read_back(columns):
    given_columns = {f"column {i}": np.array(column, np.int64) for i, column in enumerate(columns)}
    read = unpacked(packed(given_columns))
    assert list(read) == list(given_columns)
    assert all(np.array_equal(read[name], given_columns[name]) for name in read)


def shown_members(plan: StepPlan, every: int) -> list[tuple]:
    """(micro-batch, rank, tokens, documents held whole, documents split, ranks) of each shown member."""
    rows = []
    whole, member = members_of_whole(plan)
    for i in range(len(plan.cost)):
        documents = range(plan.first_document[i], plan.first_document[i + 1])
        split = sorted(int(plan.doc[d]) for d in documents if d not in whole)
        for m in range(plan.first_member[i], plan.first_member[i + 1]):
            if plan.rank[m] % every == 0:
                mine = sorted(plan.doc[whole[member == m]].tolist())
                rows.append((i, int(plan.rank[m]), int(plan.member_tokens[m]), mine, split, int(plan.members[i])))
    return rows


def read_back(columns: dict, kept: list[int]) -> list[tuple]:
    """The same, from packed columns; `kept` are the micro-batches that have a member shown."""
    read, rows = unpacked(columns), []
    member = document = 0
    for i, batch in enumerate(kept):
        members, documents = read["members"][i], read["documents"][i]
        docs = read["doc"][document : document + documents].tolist()
        holders = read["holder"][document : document + documents].tolist()
        rank = -1
        for position in range(members):
            rank += int(read["step"][member + position]) + 1
            mine = sorted(doc for doc, holder in zip(docs, holders) if holder == position + 1)
            split = sorted(doc for doc, holder in zip(docs, holders) if holder == 0)
            tokens, ranks = int(read["tokens"][member + position]), int(read["ranks"][i])
            rows.append((batch, rank * columns["every"], tokens, mine, split, ranks))
        member, document = member + members, document + documents
    return rows


baselines = st.tuples(st.sampled_from(["static_cp", "bytescale_balanced"]), steps(equal=True))


@given(planned=st.one_of(st.tuples(st.just("hdp"), steps()), baselines), every=st.sampled_from([1, 2, 4]))
def test_a_timeline_holds_the_plan_or_every_second_rank_of_it(planned, every):
    planner, (lengths, topology, cost) = planned
    plan = PLANNERS[planner](lengths, topology, cost, "async")
    times = Times.of(plan)
    columns = timeline_columns(plan, times, every)
    expected = shown_members(plan, every)
    kept = sorted({row[0] for row in expected})
    assert read_back(columns, kept) == expected
    read = unpacked(columns)
    precision = 2 * times.makespan / (1 << 24)
    assert np.abs(read["start"] * columns["tick"] - times.start[kept]).max(initial=0) <= precision
    assert np.abs((read["start"] + read["duration"]) * columns["tick"] - times.stop[kept]).max(initial=0) <= precision


def test_a_mixed_micro_batch_is_packed_with_what_each_rank_holds_whole():
    plan = mixed_plan()
    for every, kept in ((1, [0, 1, 2]), (2, [0, 1, 2])):
        assert read_back(timeline_columns(plan, Times.of(plan), every), kept) == shown_members(plan, every)
    assert [row[3:5] for row in shown_members(plan, 1)][:3] == [([1], [0]), ([], [0]), ([], [0])]


def test_large_timelines_show_fewer_ranks_the_first_plan_last():
    lengths = lognormal_pareto(2000, 0, 500_000)
    plans = [
        PLANNERS[name](lengths, Topology(256, 8192), GPU_COST, "async") for name in ("hdp", "bytescale_naive", "hdp")
    ]
    times = [Times.of(plan) for plan in plans]
    whole = timelines_within(plans, times, 10**9)
    assert [columns["every"] for columns in whole] == [1, 1, 1]
    size = sum(len(columns["data"]) for columns in whole)
    thinned = timelines_within(plans, times, size // 2)
    assert sum(len(columns["data"]) for columns in thinned) <= size // 2
    assert thinned[0]["every"] == 1
    assert all(columns["every"] > 1 and columns["rows"] * columns["every"] >= 256 for columns in thinned[1:])
    assert [columns["every"] for columns in timelines_within(plans, times, 1)] == [256] * 3


@given(
    rectangles=st.lists(
        st.tuples(*[st.tuples(st.floats(0, 5, width=32), st.floats(0, 5, width=32)).map(sorted)] * 2),
        min_size=1,
        max_size=6,
    )
)
def test_pixels_are_what_they_cover(rectangles):
    edges = np.array([[*rows, *columns] for rows, columns in rectangles])
    weights = np.random.default_rng(0).random((len(edges), 2))
    pixels = covered(edges, weights, 5, 5)

    def overlap(low: float, high: float, cell: int) -> float:
        return max(0.0, min(high, cell + 1) - max(low, cell))

    for row in range(5):
        for column in range(5):
            shares = [overlap(top, bottom, row) * overlap(left, right, column) for top, bottom, left, right in edges]
            np.testing.assert_allclose(pixels[row, column], shares @ weights, atol=1e-9)


def test_times_are_those_of_the_plan_or_of_a_run_in_seconds():
    plan = mixed_plan()
    predicted = Times.of(plan)
    assert (predicted.start.tolist(), predicted.stop.tolist(), predicted.makespan) == ([0, 7, 10], [7, 10, 14], 14)
    run = Times.of(plan, SimpleNamespace(start=[0, 1, 2], stop=[1, 1.5, 3]))
    assert (run.start.tolist(), run.stop.tolist(), run.makespan) == ([0, 1e9, 2e9], [1e9, 1.5e9, 3e9], 3e9)
    with pytest.raises(ValueError, match=r"this plan has 3 micro-batches, so each must have the shape \(3,\)"):
        Times.of(plan, SimpleNamespace(start=np.zeros(2), stop=np.ones(2)))
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Times.of(plan, SimpleNamespace(start=[0, 1, 2], stop=[1, 0.5, 3]))


def test_bytes_have_three_digits():
    numbers = {
        0: "0 bytes",
        999: "999 bytes",
        1000: "0.977 KiB",
        1_023_400: "999 KiB",
        1_023_900: "0.976 MiB",
        5 << 20: "5 MiB",
        131 << 30: "131 GiB",
        3 << 60: "3.07e+03 PiB",
    }
    assert {number: short_bytes(number) for number in numbers} == numbers
