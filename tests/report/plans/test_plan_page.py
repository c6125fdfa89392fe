"""The page of plans, in a real browser: it holds the plans' numbers, needs no network, and is drawn in the dark too."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from hf_longctx.planner import PLANNERS
from hf_longctx.report.pictures.canvas import short_bytes
from hf_longctx.report.planner_names import PLANNER_NAMES, planner_name
from hf_longctx.report.plans.plan_page import FIRST_OF_GROUP, write_page
from hf_longctx.report.plans.rank_load import received_tokens
from tests.builders.plans.plan_pages import (
    KV_BYTES,
    MEMORY,
    SIZES,
    in_a_browser,
    lengths_of,
    named_ns,
    opened,
    plans_of,
    write,
)
from tests.worlds.browser import browser, open_page


@in_a_browser
@pytest.mark.parametrize("ranks", SIZES)
def test_the_page_holds_the_numbers_of_the_plans(ranks, tmp_path):
    plans = plans_of(ranks)
    probe = """
    const rows = (id) => [...document.querySelectorAll(`#${id} tr`)].map((tr) => [...tr.children].map((cell) => cell.innerText));
    return { headline: document.getElementById("headline").innerText, title: document.title, plans: rows("certificates"),
             lengths: rows("lengths"), text: document.body.innerText, canvases: document.querySelectorAll("canvas").length };"""
    page = opened(plans, tmp_path, probe, kv_bytes_per_token=KV_BYTES, memory=MEMORY).answer
    assert page["title"] == "Step 7 of <a test>"
    assert page["canvases"] == len(plans)
    header, *rows = page["plans"]
    named = [(name, code) for name, *_, code in (row[0].splitlines() for row in rows)]
    assert named == [(PLANNER_NAMES[plan.planner][0], plan.planner) for plan in plans]
    for plan, cells in zip(plans, rows):
        shown, summary = dict(zip(header, cells)), plan.summary()
        assert shown["times the lower bound"] == f"{summary.balance:.3f}"
        assert shown["idle"] == f"{summary.idle_share:.1%}"
        assert named_ns(shown["planned step"]) == pytest.approx(summary.makespan, rel=1e-3)
        assert shown["exchanged"] == short_bytes(summary.exchanged_tokens * KV_BYTES)
        assert shown["of that for balance"] == short_bytes(summary.redundant_tokens * KV_BYTES)
        assert shown["of that between nodes"] == short_bytes(summary.between_nodes_tokens * KV_BYTES)
        assert shown["documents split"] == f"{summary.split_documents:,}"
        least, median, most = summary.micro_batches_per_rank
        assert shown["micro-batches per rank *"] == f"{least:,} / {median:g} / {most:,}"
        assert shown["most tokens on a rank"] == f"{plan.peak_tokens.max():,}"
        assert shown["most memory on a rank"] == short_bytes(MEMORY.peak(int(plan.peak_tokens.max())))
        received = received_tokens(plan) * KV_BYTES
        worst = f"Rank {received.argmax():,} receives most, {short_bytes(round(received.max()))}"
        assert worst in page["text"]
    ours = plans[0].summary()
    assert f"{ours.documents:,} documents ({ours.tokens:,} tokens) on {ranks:,} ranks" in page["headline"]
    factor = plans[1].summary().makespan / ours.makespan
    assert f"It would take {factor:.2f} times as long with {planner_name(plans[1].planner)}" in page["headline"]
    counts = [tuple(int(cell.replace(",", "")) for cell in row[1:3]) for row in page["lengths"][1:]]
    assert np.sum(counts, axis=0).tolist() == [ours.documents, ours.tokens]


@in_a_browser
def test_charts_of_ranks_say_what_lies_under_the_pointer(tmp_path):
    plan = plans_of(16_384)[0]
    probe = """
    const charts = [...document.querySelectorAll(".ranks-chart")], tip = document.getElementById("tip");
    return charts.map((chart) => {
      const svg = chart.querySelector("svg");
      chart.scrollIntoView();
      const box = svg.getBoundingClientRect(), at = { clientX: box.left + box.width * 0.3755, clientY: box.top + 5 };
      svg.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, ...at }));
      const said = [...tip.children].map((line) => line.textContent);
      svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
      const next = tip.firstChild.textContent;
      svg.dispatchEvent(new PointerEvent("pointerleave"));
      return { title: chart.querySelector("h3").textContent, said, next, hidden: tip.hidden };
    });"""
    tokens, received, memory = opened([plan], tmp_path, probe, kv_bytes_per_token=KV_BYTES, memory=MEMORY).answer
    ranks = slice(6144, 6208)
    assert tokens["title"] == "Most tokens held at a time"
    assert tokens["said"][0] == "Ranks 6,144 to 6,207"
    assert tokens["said"][1] == f"most: {plan.peak_tokens[ranks].max():,} tokens"
    assert tokens["next"] == "Ranks 6,208 to 6,271"
    assert received["said"][1].startswith("most: ")
    assert memory["said"][1].startswith("peak: ")
    assert len(memory["said"]) > 5
    assert all(chart["hidden"] for chart in (tokens, received, memory))


@in_a_browser
def test_simulated_runs_are_shown_beside_the_prediction(tmp_path):
    plan = plans_of(4)[0]
    timeline = plan.timeline()
    slower = SimpleNamespace(start=timeline.start * 1.5e-9, stop=timeline.stop * 1.5e-9)
    probe = """
    const cells = (row) => [...document.querySelector(`#certificates ${row} tr`).children].map((cell) => cell.innerText);
    return [cells("thead"), cells("tbody"), document.getElementById("headline").innerText,
            JSON.parse(document.querySelector("canvas").dataset.plot).t1];"""
    header, cells, headline, end = opened([plan], tmp_path, probe, simulations=[slower]).answer
    shown = dict(zip(header, cells))
    assert named_ns(shown["simulated step"]) == pytest.approx(1.5 * named_ns(shown["planned step"]), rel=1e-3)
    assert shown["simulated idle"] == shown["idle"] == f"{plan.summary().idle_share:.1%}"
    assert f"the step takes {shown['simulated step']} in simulation (planned {shown['planned step']}" in headline
    assert end == pytest.approx(1.5 * 1.005 * timeline.makespan, rel=1e-3)


@in_a_browser
def test_bars_are_as_long_as_what_they_stand_for(tmp_path):
    """Widths in pixels over what stands beside them: the same for all bars of a column, and for heights over an axis."""
    plans = plans_of(64)
    probe = """
    const number = (text) => Number(text.replaceAll(",", "").split(" ")[0]), wide = (part) => part.getBoundingClientRect().width;
    const bars = [...document.querySelectorAll(".lengths tbody tr")].map((row) => [...row.querySelectorAll(".bar")].map(
      (bar) => [wide(bar.querySelector("i")), number(bar.innerText)]));
    const rows = [...document.querySelector(".comparison").querySelectorAll(".named-bars > div")];
    const times = rows.map((row) => [...row.querySelectorAll(".track > span")].reduce((sum, part) => sum + wide(part), 0));
    const chart = document.querySelector(".ranks-chart"), box = chart.querySelector(".plot").getBoundingClientRect();
    const marks = [...chart.querySelectorAll(".mark")].map(
      (mark) => [box.bottom - mark.getBoundingClientRect().top, number(mark.innerText)]);
    const limit = box.bottom - chart.querySelector(".limit").getBoundingClientRect().top;
    return { bars, times, marks, limit, ours: rows.map((row) => row.className) };"""
    page = opened(plans, tmp_path, probe, kv_bytes_per_token=KV_BYTES).answer
    for column in (0, 1):
        widths, numbers = np.array([row[column] for row in page["bars"]]).T
        np.testing.assert_allclose(widths / widths.max(), numbers / numbers.max(), atol=2e-3)
    makespans = np.array([plan.summary().makespan for plan in plans])
    np.testing.assert_allclose(np.array(page["times"]) / max(page["times"]), makespans / makespans.max(), atol=2e-3)
    heights, numbers = np.array(page["marks"]).T
    assert len(numbers) >= 3
    assert numbers[-1] >= plans[0].topology.capacity
    np.testing.assert_allclose(heights / heights[-1], numbers / numbers[-1], atol=0.02)
    assert page["limit"] / heights[-1] == pytest.approx(plans[0].topology.capacity / numbers[-1], abs=0.02)
    assert page["ours"] == ["ours"] + [""] * (len(plans) - 1)


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (768, False), (390, True)])
def test_the_page_fits_a_screen_and_is_drawn_in_the_dark_too(width, dark, tmp_path):
    plans = plans_of(64)
    timelines = [plan.timeline() for plan in plans]
    runs = [SimpleNamespace(start=timeline.start * 1e-9, stop=timeline.stop * 1e-9) for timeline in timelines]
    page = write(plans, tmp_path / "page.html", kv_bytes_per_token=KV_BYTES, memory=MEMORY, simulations=runs)
    probe = """
    const boxes = [...document.querySelectorAll("td, th, figure, canvas, h1, h2, h3, .places span, .mark span")];
    const outside = boxes.filter((part) => { const { left, right } = part.getBoundingClientRect();
                                             return right > innerWidth + 0.5 || left < -0.5; });
    return [getComputedStyle(document.body).backgroundColor, innerWidth, document.documentElement.scrollWidth,
            outside.map((part) => part.outerHTML)];"""
    opened_page = open_page(browser(), page, tmp_path, probe, size=(width, 900), dark=dark)
    background, inner, scrolls, outside = opened_page.answer
    assert opened_page.console == []
    assert background == ("rgb(21, 23, 27)" if dark else "rgb(255, 255, 255)")
    assert (inner, scrolls, outside) == (width, width, []), "nothing is cut off, and nothing scrolls sideways"


@in_a_browser
def test_what_would_need_a_network_is_noticed(tmp_path):
    """The check of the other tests: a page that loads a picture is not let off."""
    page = write(plans_of(4)[:1], tmp_path / "page.html")
    page.write_text(page.read_text().replace("<main>", '<main><img src="https://example.org/picture.png">'))
    assert any("Content Security Policy" in line for line in open_page(browser(), page, tmp_path).console)


def test_without_a_browser_the_failure_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_BROWSER", "/nowhere/chrome")
    with pytest.raises(
        pytest.fail.Exception, match=r"HF_LONGCTX_BROWSER=/nowhere/chrome is no program.*apt-get install chromium"
    ):
        browser()
    monkeypatch.delenv("HF_LONGCTX_BROWSER")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.fail.Exception, match=r"none of chromium, .* is on the PATH"):
        browser()


def test_the_page_names_no_other_address(tmp_path):
    page = write(plans_of(64), tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|@import|\burl\(|<link(?! rel=\"icon\" href=\"data:,\")|<script src|<img", page)


def test_colours_and_their_legend_have_the_same_groups(tmp_path):
    page = write(plans_of(4)[:1], tmp_path / "page.html").read_text()
    groups = re.search(r"const FIRST_OF_GROUP = \[(.*?)\]", page).group(1)
    assert tuple(map(int, groups.split(","))) == FIRST_OF_GROUP


def test_every_planner_has_a_name_of_its_own():
    assert set(PLANNER_NAMES) == set(PLANNERS)
    assert len(set(PLANNER_NAMES.values())) == len(PLANNERS)


def test_no_colour_of_a_page_means_two_things(tmp_path):
    """Groups of ranks, parts of memory, bars and lines, in the light and in the dark."""
    style = re.search(
        r"<style>(.*?)</style>", write(plans_of(4)[:1], tmp_path / "page.html").read_text(), re.DOTALL
    ).group(1)
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+)", part)) for part in style.split("prefers-color-scheme: dark"))
    assert set(light) == set(dark)
    for colours in (light, dark):
        assert len(set(colours.values())) == len(colours) > 25


def test_a_page_of_100_000_documents_is_below_three_megabytes(tmp_path):
    plans = plans_of(16_384)
    page = write(plans, tmp_path / "page.html", kv_bytes_per_token=KV_BYTES, memory=MEMORY)
    assert len(plans) >= 4
    assert page.stat().st_size < 3_000_000
    assert '"every": 1,' in page.read_text()


def test_modes_and_equal_names_are_told_apart(tmp_path):
    plans = [plans_of(64)[0], plans_of(64, "lockstep")[0], plans_of(64, "lockstep")[0]]
    page = write(plans, tmp_path / "page.html").read_text()
    names = re.findall(r'<th scope="row"><span>(.*?)</span>', page)
    ours = planner_name("hdp")
    assert names == [f"{ours} (async)", f"{ours} (lockstep) #2", f"{ours} (lockstep) #3"]


def test_plans_of_other_documents_are_refused(tmp_path):
    plan = plans_of(4)[0]
    with pytest.raises(ValueError, match="plans is empty"):
        write_page([], tmp_path / "page.html", lengths=np.array([1]), title="")
    with pytest.raises(ValueError, match=r"holds 40 documents of \d+ tokens, and lengths has 40 of"):
        write_page([plan], tmp_path / "page.html", lengths=lengths_of(plan) + 1, title="")
    with pytest.raises(ValueError, match="0 simulations for 1 plans"):
        write_page([plan], tmp_path / "page.html", lengths=lengths_of(plan), title="", simulations=[])
    assert not (tmp_path / "page.html").exists()
