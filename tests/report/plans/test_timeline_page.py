"""Timelines of a page, looked into in a real browser: what is under the pointer, keys, fingers, zoom, colours.

What is expected of a picture comes from the plan, never from the page's own data.
"""

import json
import re

import numpy as np
import pytest

from hf_longctx.planner import StepPlan
from tests.builders.plans.mixed_plan import mixed_plan
from tests.builders.plans.plan_pages import SIZES, in_a_browser, named_ns, opened, plans_of

# What a probe needs to point at a time (nanoseconds) and a row of a timeline.
POINTING = """
const canvas = document.querySelector(".timeline canvas"), tip = document.getElementById("tip");
canvas.setPointerCapture = () => {};   // of events that no device sent, a browser refuses it
canvas.scrollIntoView();
const plot = () => JSON.parse(canvas.dataset.plot);
function place(time, row) {
  const box = canvas.getBoundingClientRect(), p = plot();
  const across = (time - p.t0) / (p.t1 - p.t0), down = (row - p.r0) / (p.r1 - p.r0);
  return { clientX: box.left + p.left + p.width * across, clientY: box.top + p.top + p.height * down };
}
const mouse = { bubbles: true, pointerId: 1, pointerType: "mouse" };
const send = (type, at, more = {}) => canvas.dispatchEvent(new PointerEvent(type, { ...mouse, ...at, ...more }));
const said = () => tip.hidden ? null : [...tip.children].map((line) => line.textContent);
const press = (key, more = {}) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, ...more }));
"""


LARGEST_BY_NIGHT = [pytest.param(ranks, marks=[pytest.mark.nightly] * (ranks == max(SIZES))) for ranks in SIZES]


@in_a_browser
@pytest.mark.parametrize("ranks", LARGEST_BY_NIGHT)
def test_pointing_at_a_block_says_what_it_holds_and_at_a_gap_that_the_rank_waits(ranks, tmp_path):
    plan = plans_of(ranks)[0]
    timeline = plan.timeline()
    batch = np.repeat(np.arange(len(plan.cost)), plan.members)
    by_length = np.argsort(-(timeline.stop - timeline.start)[batch], kind="stable")
    members = by_length[:: max(1, len(by_length) // 20)][:8]  # long ones and short ones, more of the long
    points = [((timeline.start + timeline.stop)[batch[m]] / 2, int(plan.rank[m]) + 0.5) for m in members]
    last = np.zeros(ranks)
    np.maximum.at(last, plan.rank, timeline.stop[batch])
    waits = int(last.argmin())
    points.append(((last[waits] + timeline.makespan) / 2, waits + 0.5))
    probe = (
        POINTING
        + f"""
    const answers = [];
    for (const [time, row] of {json.dumps(points)}) {{
      document.querySelector("[data-command=all]").click();
      for (let i = 0; i < {14 if ranks > 64 else 3}; i++)   // closer, until the row is pixels high
        canvas.dispatchEvent(new WheelEvent("wheel", {{ ...place(time, row), deltaY: -200, ctrlKey: true, bubbles: true }}));
      send("pointermove", place(time, row));
      answers.push(said());
    }}
    send("pointerleave", place(...{json.dumps(points[0])}));
    return [answers, said()];"""
    )
    answers, after = opened(plans_of(ranks)[:1], tmp_path, probe).answer
    assert after is None
    assert answers[-1][0] == f"Rank {waits} is idle"
    idle_from, idle_for = re.fullmatch(r"from (.+) for (.+)", answers[-1][1]).groups()
    assert named_ns(idle_from) == pytest.approx(last[waits], rel=1e-3)
    assert named_ns(idle_for) == pytest.approx(timeline.makespan - last[waits], rel=1e-3, abs=timeline.makespan * 2e-7)
    for m, lines in zip(members, answers):
        i, rank, tokens = batch[m], plan.rank[m], plan.member_tokens[m]
        documents = slice(plan.first_document[i], plan.first_document[i + 1])
        doc, length = plan.doc[documents], plan.length[documents]
        if plan.members[i] > 1:
            assert lines[0] == f"Document {doc[0]}: {length[0]:,} tokens over {plan.members[i]:,} ranks"
            assert lines[1] == f"rank {rank} holds {tokens:,} tokens"
        else:
            assert lines[0] in (
                f"Document {doc[0]}: {tokens:,} tokens, whole",
                f"{len(doc)} whole documents, {tokens:,} tokens",
            )
            assert lines[1] == f"on rank {rank}"
            assert len(doc) == 1 or f"{doc[0]} ({length[0]:,})" in lines[3]
        starts, takes = re.fullmatch(r"starts at (.+), takes (.+)", lines[2]).groups()
        assert named_ns(starts) == pytest.approx(timeline.start[i], rel=1e-3, abs=timeline.makespan * 2e-7)
        assert named_ns(takes) == pytest.approx(plan.cost[i], rel=1e-3, abs=timeline.makespan * 2e-7)


@in_a_browser
def test_a_micro_batch_of_split_and_whole_documents_says_both(tmp_path):
    probe = (
        POINTING
        + "return [[3, 0.5], [3, 1.5], [8, 2.5], [12, 1.5]].map((at) => { send('pointermove', place(...at)); return said(); });"
    )
    both, split, whole, several = opened([mixed_plan()], tmp_path, probe).answer
    assert both[:2] == ["Document 0: 20 tokens over 3 ranks", "rank 0 holds 37 tokens, 1 whole document among them"]
    assert split[:2] == ["Document 0: 20 tokens over 3 ranks", "rank 1 holds 7 tokens"]
    assert whole[:2] == ["Document 2: 5 tokens, whole", "on rank 2"]
    assert several[:2] == ["2 documents, 26 tokens over 4 ranks", "rank 1 holds 7 tokens"]


@in_a_browser
def test_keys_go_from_micro_batch_to_micro_batch_and_zoom(tmp_path):
    plan = plans_of(4)[0]
    of_rank = [plan.layouts(rank) for rank in range(4)]
    probe = (
        POINTING
        + """
    canvas.focus();
    const seen = [];
    for (const way of ["Right", "Right", "Right", "Left", "Down", "Down", "Up"]) { press(`Arrow${way}`); seen.push(said()); }
    const views = [plot()];
    for (const key of ["+", "+", "ArrowRight", "ArrowRight", "-", "r", "0"]) {
      press(key, { shiftKey: key === "ArrowRight" });
      views.push(plot());
    }
    press("Escape");
    const escaped = said();
    press("ArrowRight");
    canvas.blur();
    return { seen, views, escaped, blurred: said(), live: tip.getAttribute("aria-live") };"""
    )
    answer = opened(plans_of(4)[:1], tmp_path, probe).answer
    ranks = [re.search(r"rank (\d+)", lines[1]).group(1) for lines in answer["seen"]]
    assert ranks == ["0", "0", "0", "0", "1", "2", "1"]
    for lines, place in zip(answer["seen"][:4], (0, 1, 2, 1)):
        micro_batch, layout = of_rank[0][place]
        assert f"{layout.tokens(0):,} tokens" in lines[0] + lines[1]
        takes = re.fullmatch(r"starts at (.+), takes (.+)", lines[2]).group(2)
        assert named_ns(takes) == pytest.approx(plan.cost[micro_batch], rel=1e-3)
    spans = [view["t1"] - view["t0"] for view in answer["views"]]
    starts = [view["t0"] for view in answer["views"]]
    np.testing.assert_allclose(np.array(spans) / spans[0], [1, 1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2, 1], rtol=1e-6)
    assert starts[2] < starts[3] < starts[4]
    assert starts[7] == 0
    assert answer["escaped"] is answer["blurred"] is None
    assert answer["live"] == "polite"


@in_a_browser
def test_dragging_moves_and_two_fingers_zoom_and_a_tap_points(tmp_path):
    plan = plans_of(64)[0]
    timeline = plan.timeline()
    time = int(timeline.start[0] + timeline.stop[0]) // 2
    row = int(plan.rank[0]) + 0.5
    probe = (
        POINTING
        + f"""
    const finger = (id) => ({{ pointerId: id, pointerType: "touch" }});
    const moved = (at, dx, dy) => ({{ clientX: at.clientX + dx, clientY: at.clientY + dy }});
    const at = place({time}, {row}), views = [plot()];
    send("pointerdown", at, finger(5)); send("pointerup", at, finger(5));
    const tapped = said();
    send("pointerdown", at, finger(5)); send("pointerdown", moved(at, 100, 0), finger(6));
    send("pointermove", moved(at, 200, 0), finger(6));                       // twice as far apart
    views.push(plot());
    send("pointerup", at, finger(6)); send("pointermove", moved(at, -60, 0), finger(5));
    views.push(plot());
    canvas.dispatchEvent(new WheelEvent("wheel", {{ ...at, deltaX: -200, shiftKey: true, bubbles: true }}));
    views.push(plot());
    canvas.dispatchEvent(new WheelEvent("wheel", {{ ...at, deltaY: -200, bubbles: true }}));   // scrolls the page
    send("pointerup", moved(at, -60, 0), finger(5));
    const dragged = said();
    send("pointermove", moved(at, 300, 0)); const hovered = plot();           // nothing pressed: the view stays
    for (let i = 0; i < 40; i++) press("-");
    const compare = document.querySelector("[data-command=compare]");
    return {{ tapped, views, dragged, hovered, out: plot(), compare }};"""
    )
    answer = opened([plan], tmp_path, probe).answer
    assert f"over {plan.members[0]} ranks" in answer["tapped"][0]
    before, pinched, dragged, ranks = answer["views"]
    assert (ranks["t0"], ranks["t1"]) == (dragged["t0"], dragged["t1"])
    assert ranks["r1"] - ranks["r0"] == (dragged["r1"] - dragged["r0"]) / 2 == 16
    assert pinched["t1"] - pinched["t0"] == pytest.approx((before["t1"] - before["t0"]) / 2)
    across = (time - before["t0"]) / (before["t1"] - before["t0"]) + 100 / before["width"]  # between the fingers
    between = [view["t0"] + across * (view["t1"] - view["t0"]) for view in (before, pinched)]
    assert between[0] == pytest.approx(between[1]), "what is between the fingers stays there"
    per_pixel = (pinched["t1"] - pinched["t0"]) / pinched["width"]
    assert dragged["t0"] - pinched["t0"] == pytest.approx(60 * per_pixel, rel=1e-6)
    assert answer["dragged"] is None
    assert answer["hovered"] == ranks
    assert (answer["out"]["t0"], answer["out"]["r0"], answer["out"]["r1"]) == (0, 0, 64)
    assert answer["compare"] is None, "there is nothing to compare with"


@in_a_browser
def test_one_button_gives_all_timelines_the_same_time_axis(tmp_path):
    probe = """
    const ends = () => [...document.querySelectorAll("canvas")].map((canvas) => JSON.parse(canvas.dataset.plot).t1);
    const before = ends();
    document.querySelector("[data-command=compare]").click();
    return [before, ends()];"""
    plans = plans_of(64)
    before, after = opened(plans, tmp_path, probe).answer
    makespans = [plan.summary().makespan for plan in plans]
    assert np.argsort(before).tolist() == np.argsort(makespans).tolist()
    assert len(set(after)) == 1
    assert after[0] >= max(makespans)


def busy(plan: StepPlan, time: float) -> dict[int, int]:
    """Rank -> member (row of plan.rank) that runs at a time."""
    timeline = plan.timeline()
    batch = np.repeat(np.arange(len(plan.cost)), plan.members)
    runs = np.flatnonzero((timeline.start[batch] <= time) & (time < timeline.stop[batch]))
    return {int(plan.rank[m]): int(m) for m in runs}


GROUPS = (1, 2, 3, 5, 9, 17, 65, 257)


def group(ranks: int) -> int:
    return max(i for i, first in enumerate(GROUPS) if ranks >= first)


@in_a_browser
@pytest.mark.parametrize(
    ("planner", "ranks"),
    [("hdp", min(SIZES)), ("hdp", max(SIZES)), ("static_cp", sorted(SIZES)[1])]
    + [pytest.param("static_cp", ranks, marks=pytest.mark.nightly) for ranks in SIZES],
)
def test_colours_are_those_of_the_group_sizes_and_the_share_of_ranks_is_right_at_any_time(ranks, planner, tmp_path):
    """Pixels of large blocks, and below the plot the height of each colour at ten times."""
    (plan,) = (plan for plan in plans_of(ranks) if plan.planner == planner)
    timeline = plan.timeline()
    size = [(int(plan.members[i] * plan.cost[i]), i) for i in range(len(plan.cost))]
    points = []
    for _, i in sorted(size, reverse=True):
        mine = plan.rank[plan.first_member[i] : plan.first_member[i + 1]]
        whole = len(mine) - 1 == mine[-1] - mine[0]
        bound = timeline.start[i] < plan.lower_bound < timeline.stop[i]  # a line that might be hit
        if len(points) < 12 and whole and not bound and (ranks <= 64 or len(mine) > 200):
            points.append((i, timeline.start[i] + 0.1 * plan.cost[i], float(mine[0] + 0.25 * len(mine))))
    # A rank that waits with 20 on either side of it. (Where ranks are drawn one by one, waiting is hatched.)
    last = np.zeros(ranks)
    np.maximum.at(last, plan.rank, timeline.stop[np.repeat(np.arange(len(plan.cost)), plan.members)])
    around = [last[max(0, rank - 20) : rank + 21].max() for rank in range(ranks)]
    waits = int(np.argmin(around))
    assert planner == "hdp" or ranks <= 64 or around[waits] < timeline.makespan / 2
    if ranks > 64 and around[waits] < 0.98 * timeline.makespan:
        points.append((None, (around[waits] + timeline.makespan) / 2, waits + 0.5))
    times = [timeline.makespan * (n + 0.5) / 10 for n in range(10)]
    probe = (
        POINTING
        + f"""
    const scale = devicePixelRatio, p = plot(), box = canvas.getBoundingClientRect();
    const {{ data, width }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const pixel = (x, y) => [...data.slice(4 * (Math.round(y * scale) * width + Math.round(x * scale))).slice(0, 3)];
    const style = getComputedStyle(document.documentElement);
    const names = ["idle", ...Array.from({{ length: 8 }}, (_, i) => `g${{i}}`)];
    const colours = names.map((name) => style.getPropertyValue(`--${{name}}`).trim());
    const blocks = {json.dumps([list(point[1:]) for point in points])}.map((at) => {{
      const {{ clientX, clientY }} = place(...at);
      return pixel(clientX - box.left, clientY - box.top);
    }});
    const strip = {json.dumps(times)}.map((time) => {{
      const x = place(time, 0).clientX - box.left, column = [];
      for (let y = 0; y < 64; y++) column.push(pixel(x, p.top + p.height + 12 + y));
      return column;
    }});
    return {{ colours, blocks, strip }};"""
    )
    answer = opened([plan], tmp_path, probe).answer
    colours = np.array([[int(hex_[i : i + 2], 16) for i in (1, 3, 5)] for hex_ in answer["colours"]])
    assert points
    for (i, _, _), pixel in zip(points, answer["blocks"]):
        nearest = int(np.abs(colours - pixel).sum(1).argmin())
        assert np.abs(colours[nearest] - pixel).max() <= 3
        assert nearest == (0 if i is None else 1 + group(int(plan.members[i])))
    for time, column in zip(times, answer["strip"]):
        nearest = np.abs(colours[None] - np.array(column)[:, None]).sum(2).argmin(1)
        members = list(busy(plan, time).values())
        batches = np.searchsorted(plan.first_member, members, side="right") - 1
        expected = np.bincount([1 + group(int(plan.members[i])) for i in batches], minlength=9).astype(float)
        expected[0] = ranks - len(members)
        # A pixel is 1/64 of the height and 1/1000 of the time; edges of colours are mixed.
        assert np.abs(np.bincount(nearest, minlength=9) / 64 - expected / ranks).max() < 0.07
