"""Pictures: they show what the plan and the log say, and no text lies on another."""

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.image import imread

from hf_longctx.planner import PLANNERS, CostModel, StepPlan, Topology, plan_step
from hf_longctx.planner.topology import SPLIT
from hf_longctx.report.pictures.canvas import PALE, WIDTH_INCHES, PictureError, short_tokens, time_unit
from hf_longctx.report.pictures.loss_picture import curve, draw_loss, loss_figure
from hf_longctx.report.plans.plan_picture import LUMINANCE, Block, blocks_of, draw_plans, plans_figure

COST = CostModel(attention_ps=100_000, linear_ps=1_000_000, inside_ps=1_000, document_ns=10_000)
QUICKSTART = np.array([5012, 3472, 2082, 700, 650, 400, 380, 300, 260, 120, 90, 70, 60, 40])


def plan_of(lengths: np.ndarray, world_size: int, capacity: int = 4096) -> StepPlan:
    return plan_step(np.asarray(lengths), Topology(world_size, capacity), COST)


def mixture(documents: int, longest: int) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(0).normal(7.6, 1.7, documents)).astype(np.int64) + 1
    return np.append(np.minimum(lengths, longest), longest)


def boxes_of_labels(figure) -> list:
    return [text.get_window_extent() for ax in figure.axes for text in ax.texts]


def overlap(a, b) -> bool:
    """Measure the overlap of the ink: line spacing, which a text's box includes, may touch."""
    return a.x0 + 1 < b.x1 and b.x0 + 1 < a.x1 and a.y0 + 1 < b.y1 and b.y0 + 1 < a.y1


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    world_size=st.integers(1, 9),
)
def test_blocks_hold_what_each_rank_holds_when_it_holds_it(lengths, world_size):
    plan = plan_of(lengths, world_size, capacity=300)
    timeline = plan.timeline()
    blocks = blocks_of(plan)
    assert sum(block.tokens for block in blocks) == sum(lengths)
    split = {block.split_tokens for block in blocks} - {0}
    for rank in range(world_size):
        shown = [block for block in blocks if block.first_rank <= rank <= block.last_rank]
        layouts = plan.layouts(rank)
        assert [(b.start, b.stop) for b in shown] == [(timeline.start[m], timeline.stop[m]) for m, _ in layouts]
        for block, (_, layout) in zip(shown, layouts):
            mine = {segment.doc for segment in layout.shard(rank)}
            shared = {doc: ranks for doc, ranks in layout.split_documents.items() if doc in mine}
            assert block.split_tokens == max((layout.doc_lengths[doc] for doc in shared), default=0)
            assert bool(block.split_ranks) == bool(shared)
            if not shared:
                assert (block.documents, block.tokens) == (len(mine), layout.tokens(rank))
            else:
                assert block.split_ranks in {len(ranks) for ranks in shared.values()}
                assert block.split_tokens in split


def test_one_micro_batch_may_hold_split_and_whole_documents_on_ranks_that_lie_apart():
    """Ranks 0, 1 and 3 share document 0; rank 0 also holds all of 1, which is longer. Rank 2 and then rank 3 hold 2 and 3 in
    one micro-batch, without sharing."""
    plan = StepPlan(
        topology=Topology(world_size=4, capacity=40),
        first_member=np.array([0, 3, 5]),
        rank=np.array([0, 1, 3, 2, 3]),
        first_document=np.array([0, 2, 4]),
        doc=np.array([0, 1, 2, 3]),
        length=np.array([20, 30, 5, 6]),
        holder=np.array([SPLIT, 0, 2, 3]),
        cost=np.array([7, 3]),
        lower_bound=5,
        offload=np.zeros(2),
        round=np.zeros(2),
    )
    plan.check(plan.length)
    shared = {"start": 0, "stop": 7, "split_tokens": 20, "split_ranks": 3, "split_documents": 1}
    alone = {"start": 7, "stop": 10, "split_tokens": 0, "split_ranks": 0, "split_documents": 0, "documents": 1}
    assert blocks_of(plan) == [
        Block(first_rank=0, last_rank=1, documents=2, tokens=44, **shared),
        Block(first_rank=3, last_rank=3, documents=1, tokens=6, **shared),
        Block(first_rank=2, last_rank=2, tokens=5, **alone),
        Block(first_rank=3, last_rank=3, tokens=6, **alone),
    ]


def test_several_documents_that_the_same_ranks_share_are_counted():
    plan = StepPlan(
        topology=Topology(world_size=2, capacity=40),
        first_member=np.array([0, 2]),
        rank=np.array([0, 1]),
        first_document=np.array([0, 3]),
        doc=np.array([0, 1, 2]),
        length=np.array([9, 20, 4]),
        holder=np.array([SPLIT, SPLIT, 1]),
        cost=np.array([7]),
        lower_bound=5,
        offload=np.zeros(1),
        round=np.zeros(1),
    )
    (block,) = blocks_of(plan)
    assert (block.split_tokens, block.split_ranks, block.split_documents, block.documents) == (20, 2, 2, 3)
    assert list(block.labels())[::2] == ["3 documents over 2 ranks", "3 docs\n33"]


def test_a_document_over_all_ranks_is_one_block_with_its_length_and_ranks():
    (block,) = blocks_of(plan_of([16_000], 4))
    assert (block.first_rank, block.last_rank, block.split_tokens, block.split_ranks) == (0, 3, 16_000, 4)
    assert next(block.labels()) == "16,000 tokens over 4 ranks"


def test_packed_documents_are_counted():
    (block,) = blocks_of(plan_of([5, 6, 7], 1))
    assert list(block.labels()) == ["3 documents, 18 tokens", "3 documents\n18 tokens", "3 docs\n18", "18"]


@pytest.mark.parametrize(
    ("world_size", "lengths", "steps"),
    [
        (1, [7], 1),
        (2, QUICKSTART, 1),
        (2, QUICKSTART, 4),
        (8, mixture(40, 20_000), 1),
        (64, mixture(800, 200_000), 1),
        (64, mixture(300, 150_000), 3),
        (1024, mixture(4000, 2_000_000), 1),
        (16_384, mixture(100_000, 2_000_000), 1),
    ],
)
def test_labels_lie_in_the_picture_and_on_no_other_label(world_size, lengths, steps):
    figure = plans_figure([plan_of(lengths, world_size)] * steps)
    figure.draw_without_rendering()
    boxes = boxes_of_labels(figure)
    assert len(boxes) >= steps
    assert not [pair for pair in combinations(boxes, 2) if overlap(*pair)]
    panels = [ax.get_window_extent() for ax in figure.axes[:steps]]
    assert all(any(p.x0 <= b.x0 and b.x1 <= p.x1 and p.y0 <= b.y0 and b.y1 <= p.y1 for p in panels) for b in boxes)
    titles = [t for ax in figure.axes[:steps] for t in (ax.title, ax._left_title, ax._right_title)]
    outside = [t.get_window_extent() for t in titles if t.get_text()] + [x.get_window_extent() for x in figure.legends]
    assert not [pair for pair in combinations(outside, 2) if overlap(*pair)]
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= figure.bbox.x1 and b.y1 <= figure.bbox.y1 for b in outside)


def test_a_split_document_has_one_colour_on_all_its_ranks_and_packed_ones_are_grey(tmp_path):
    plan = plan_of(QUICKSTART, 2)
    figure = plans_figure([plan])
    figure.savefig(tmp_path / "plan.png")
    pixels = imread(tmp_path / "plan.png")
    ax = figure.axes[0]
    per_unit = max(block.stop for block in blocks_of(plan)) / (ax.get_xlim()[1] / 1.01)
    seen = {}
    for block in blocks_of(plan):
        for rank in range(block.first_rank, block.last_rank + 1):
            # One tenth into the block: beside the label and the edge.
            time = (block.start + 0.1 * (block.stop - block.start)) / per_unit
            x, y = ax.transData.transform((time, rank - 0.3))
            seen.setdefault((block.start, block.split_tokens), set()).add(tuple(pixels[-round(y), round(x), :3]))
    assert len({tokens for _, tokens in seen}) > 1
    for (_, split_tokens), colours in seen.items():
        assert len(colours) == 1, "one colour on all ranks of a document"
        is_grey = np.allclose(next(iter(colours)), to_rgba(PALE)[:3], atol=0.01)
        assert is_grey == (split_tokens == 0)


def test_where_ranks_are_thinner_than_pixels_blocks_are_still_coloured_and_waiting_is_not(tmp_path):
    plan = PLANNERS["bytescale_balanced"](mixture(4000, 2_000_000), Topology(1024, 4096), COST, "async")  # some wait
    figure = plans_figure([plan])
    figure.savefig(tmp_path / "plan.png")
    pixels = imread(tmp_path / "plan.png")
    ax = figure.axes[0]
    blocks = blocks_of(plan)
    per_unit = max(block.stop for block in blocks) / (ax.get_xlim()[1] / 1.01)

    def colour(time, rank) -> np.ndarray:
        x, y = ax.transData.transform((time / per_unit, rank))
        return pixels[-round(y), round(x), :3]

    last = max(block.stop for block in blocks)
    high = [
        block for block in blocks if block.last_rank - block.first_rank >= 20 and block.stop - block.start > last / 20
    ]
    light = {}
    for block in high:
        middle, lasts = (block.first_rank + block.last_rank) / 2 - 5, block.stop - block.start
        one, other = (colour(block.start + share * lasts, middle) for share in (0.1, 0.2))
        np.testing.assert_allclose(one, other, atol=0.01)
        light[block.split_tokens] = one @ LUMINANCE
    assert len(light) > 3
    longest_first = [light[tokens] for tokens in sorted(light, reverse=True)]
    assert np.diff(longest_first).min() > -0.005, "longer is darker, to a shade of a screen"
    stops = np.zeros(1024)
    for block in blocks:
        stops[block.first_rank : block.last_rank + 1] = np.maximum(
            stops[block.first_rank : block.last_rank + 1], block.stop
        )
    waiting = stops.reshape(-1, 32).max(1)  # of 32 adjacent ranks
    first = int(waiting.argmin())
    around = [colour((waiting[first] + stops.max()) / 2, 32 * first + rank) for rank in range(8, 24)]
    assert np.mean(around) > 0.9


def test_pictures_are_written_where_they_are_wanted(tmp_path):
    plan = plan_of(QUICKSTART, 2)
    draw_plans([plan], tmp_path / "new" / "plan.png")
    draw_plans([plan, plan], tmp_path / "plans.svg", first_step=3)
    width = imread(tmp_path / "new" / "plan.png").shape[1]
    assert width >= 1200
    assert width == WIDTH_INCHES * 160
    assert "Step 4:" in (tmp_path / "plans.svg").read_text()
    with pytest.raises(ValueError, match="plans is empty"):
        draw_plans([], tmp_path / "none.png")


LOG = [
    {"eval_loss": 1.92, "step": 0},
    {"loss": 1.95, "grad_norm": 2.0, "learning_rate": 5e-5, "step": 1},
    {"loss": 1.90, "grad_norm": float("nan"), "learning_rate": 1e-4, "step": 2},
    {"loss": 1.85, "learning_rate": 0.0, "step": 3},
    {"eval_loss": 1.81, "step": 3},
    {"train_runtime": 3.0, "train_loss": 1.9, "step": 3},
]


def test_curves_hold_the_finite_values_in_the_order_of_the_steps():
    assert curve(LOG, "eval_loss") == ([0, 3], [1.92, 1.81])
    assert curve(LOG, "grad_norm") == ([1], [2.0])
    assert curve([{"loss": 2.0, "step": 5}, {"loss": 3.0, "step": 4}, {"loss": 1.0, "step": 5}], "loss") == (
        [4, 5],
        [3.0, 1.0],
    )
    assert curve([{"loss": 1.0}, {"loss": "n/a", "step": 1}], "loss") == ([], [])


def test_the_loss_picture_shows_every_logged_point(tmp_path):
    figure = loss_figure(LOG)
    lines = {line.get_label(): line.get_xydata().tolist() for ax in figure.axes for line in ax.lines}
    assert lines["training loss"] == [[1, 1.95], [2, 1.90], [3, 1.85]]
    assert lines["held-out loss"] == [[0, 1.92], [3, 1.81]]
    assert lines["gradient norm"] == [[1, 2.0]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.920", "1.810"]
    draw_loss(LOG, tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").shape[1] >= 1200


@pytest.mark.parametrize("key", ["loss", "eval_loss", "learning_rate", "grad_norm"])
def test_the_loss_picture_does_without_any_one_quantity(tmp_path, key):
    without = [{name: value for name, value in entry.items() if name != key} for entry in LOG]
    names = {"loss": "training loss", "eval_loss": "held-out loss", "grad_norm": "gradient norm"}
    drawn = {line.get_label() for ax in loss_figure(without).axes for line in ax.lines}
    assert drawn == {name for quantity, name in names.items() if quantity != key}


@pytest.mark.parametrize("log", [LOG, LOG[1:], LOG[:1], LOG[:4]], ids=["both ends", "last", "only", "first"])
def test_labels_of_the_held_out_loss_lie_in_its_panel(log):
    figure = loss_figure(log)
    figure.draw_without_rendering()
    panel = figure.axes[0].get_window_extent()
    labels = boxes_of_labels(figure)
    assert labels
    assert all(panel.x0 <= box.x0 and box.x1 <= panel.x1 and box.y1 <= panel.y1 for box in labels)


def test_an_empty_log_says_so():
    assert [text.get_text() for text in loss_figure([]).axes[0].texts] == ["no loss was logged"]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PictureError, match=r"pip install 'hf_longctx\[report\]'"):
        draw_loss(LOG, tmp_path / "loss.png")
    with pytest.raises(PictureError, match=r"pip install 'hf_longctx\[report\]'"):
        draw_plans([plan_of([3], 1)], tmp_path / "plan.png")


@pytest.mark.processes
def test_importing_the_pictures_loads_no_matplotlib():
    modules = "hf_longctx.report.plans.plan_picture, hf_longctx.report.pictures.loss_picture"
    check = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_short_numbers_and_units():
    lengths = {
        950: "950",
        1023: "1023",
        1024: "1K",
        1800: "1.8K",
        8192: "8K",
        156_238: "153K",
        524_288: "512K",
        2**21: "2M",
    }
    assert {tokens: short_tokens(tokens) for tokens in lengths} == lengths, "K is 1,024, as contexts are named"
    assert time_unit(500)[0] == "nanoseconds"
    assert time_unit(61 * 10**9)[0] == "seconds"
    assert time_unit(3 * 60 * 10**9) == ("minutes", 6e10)


@pytest.mark.parametrize("lengths", [[5000, 1000, 400, 30], [1500, 1100, 30]])
def test_marks_of_the_scale_of_lengths_say_what_they_are_at(lengths):
    """Powers of two, or where too few of them lie between the lengths, the lengths themselves."""
    plan = plan_of(lengths, 4)
    figure = plans_figure([plan])
    figure.draw_without_rendering()
    scale = figure.axes[-1]
    named = {label.get_text(): round(at) for at, label in zip(scale.get_yticks(), scale.get_yticklabels())}
    assert scale.get_ylabel() == "tokens of a split document"
    assert len(named) >= 2
    for text, tokens in named.items():
        assert float(text.rstrip("K").replace(",", "")) * (1024 if text.endswith("K") else 1) == tokens
    assert all(tokens in lengths or tokens & (tokens - 1) == 0 for tokens in named.values())
