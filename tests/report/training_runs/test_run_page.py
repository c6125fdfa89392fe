"""The report of a run that two ranks really trained and pushed: its page in a browser, and the folder that went to the hub."""

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load

from hf_longctx.config import load_config
from hf_longctx.redaction import HIDDEN, redacted
from hf_longctx.report.pictures.axis import ticks, whole_numbers
from hf_longctx.report.pictures.line_chart import MOST_POINTS, Curve, line_chart
from hf_longctx.report.training_runs.run_charts import charts
from hf_longctx.report.training_runs.run_log import RunLog
from hf_longctx.report.training_runs.run_page import write_run_page
from hf_longctx.report.training_runs.run_record import FORMAT, plan_of
from hf_longctx.report.training_runs.saved_weights import weights_hash
from hf_longctx.run import run as run_config
from hf_longctx.training.run_start import FINISHED
from tests.builders.plans.plan_pages import in_a_browser
from tests.builders.tiny_models import TINY
from tests.builders.training_runs import Rows, fresh_accelerator_state
from tests.report.training_runs.local_hub import LocalHub
from tests.worlds.browser import browser, open_page
from tests.worlds.launched import ROOT, accelerate_launch

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 600]
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
ADDRESS = "https://somebody:pass-word@example.org/run?api_key=7f3a9c"
EVALUATION = {
    "model": "tiny",
    "tokens": 800,
    "documents": 2,
    "loss": 2.5,
    "by_position": [
        {"from": 0, "to": 256, "tokens": 400, "loss": 2.75},
        {"from": 256, "to": 1024, "tokens": 400, "loss": 2.25},
    ],
    "by_length": [{"from": 256, "to": 1024, "documents": 2, "tokens": 800, "loss": 2.5}],
    "retrieval": [
        {"task": "passkey", "length": length, "depth": depth, "trials": 4, "found": hits}
        for length, depth, hits in ((256, 0.0, 4), (256, 0.5, 3), (512, 0.0, 1), (512, 0.5, 0))
    ],
}


def counting(lengths: list[int]) -> Rows:
    return [{"input_ids": [(7 * length + i) % TINY["vocab_size"] for i in range(length)]} for length in lengths]


@dataclass
class Pushed:
    """What a run left and sent."""

    folder: Path
    files: dict[str, bytes]
    output: str
    log: list[dict[str, Any]]


def settings(folder: Path) -> dict[str, Any]:
    """configs/tiny.yaml with documents of this test."""
    chosen = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    chosen["model"]["random_init"]["vocab_size"] = TINY["vocab_size"]
    for name, lengths in (("train", LENGTHS), ("test", [4, 2, 181, 34])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in counting(lengths)))
    chosen["data"]["path"] = {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
    chosen["longctx"] = {"capacity": 320, "global_batch_documents": 4}
    chosen["training"] |= {"output_dir": str(folder / "out"), "max_steps": 6, "save_strategy": "no"}
    return chosen


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> Pushed:
    """A run with a token, beside what an earlier one left when it was killed."""
    folder = tmp_path_factory.mktemp("pushed")
    chosen = settings(folder)
    chosen["training"] |= {
        "push_to_hub": True,
        "hub_strategy": "end",
        "hub_model_id": "somebody/tiny",
        "hub_token": TOKEN,
        "run_name": ADDRESS,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(chosen))
    for left in (".writing-checkpoint-9/model.safetensors", "checkpoint-1/state-00001-of-00002.safetensors"):
        (folder / "out" / left).parent.mkdir(parents=True)
        (folder / "out" / left).write_bytes(b"half")
    with LocalHub() as hub:
        reach = {"HF_ENDPOINT": hub.address, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        ended = accelerate_launch(*("scripts/train.py", "--config", folder / "config.yaml"), fresh=True, **reach)
    assert ended.code == 0, ended.output
    assert hub.unknown == []
    assert TOKEN in hub.tokens
    log = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    return Pushed(folder / "out", hub.files, ended.output, log)


def test_what_is_pushed_is_a_model_with_its_card_and_report_and_nothing_else(pushed):
    names = set(pushed.files)
    wanted = {
        "README.md",
        "report.html",
        "run.json",
        "results.json",
        "config.json",
        "model.safetensors",
        "trainer_state.json",
    }
    assert wanted <= names
    assert not [name for name in names if re.search(r"(^|/)[._]|checkpoint-|optimizer|\.bin$|\.pt$|\.pth$", name)], (
        names
    )
    assert not (pushed.folder / ".writing-checkpoint-9").exists()
    assert (pushed.folder / "checkpoint-1").exists(), "kept here"
    assert len(load(pushed.files["model.safetensors"])) > 5
    for name in wanted:
        assert pushed.files[name] == (pushed.folder / name).read_bytes() or name in (
            "README.md",
            "report.html",
            "run.json",
            "results.json",
        )
    final = json.loads((pushed.folder / "results.json").read_text())
    assert final.pop(FINISHED) > 0, "written when everything else is there, after the push"
    assert json.loads(pushed.files["results.json"]) == final
    assert sum(map(len, pushed.files.values())) < 3_000_000


def test_no_secret_is_in_what_is_pushed(pushed):
    for name, content in pushed.files.items():
        for secret in (TOKEN, "pass-word", "7f3a9c"):
            assert secret.encode() not in content, (name, secret)
    assert b"example.org/run" in pushed.files["training_args.json"], "without its secrets"
    assert f"hub_token: {HIDDEN}" in pushed.files["report.html"].decode()


def test_the_card_that_is_pushed_is_valid_and_has_the_numbers(pushed):
    card = ModelCard(pushed.files["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.base_model is None, "it was trained from nothing"
    assert "long-context" in card.data.tags
    results = json.loads((pushed.folder / "results.json").read_text())
    metrics = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert metrics["loss"] == pytest.approx(results["eval_loss_after"], abs=1e-4)
    assert metrics["perplexity"] == pytest.approx(np.exp(results["eval_loss_after"]), rel=1e-3)
    assert f"| Before training | {results['eval_loss_before']:.4f} |" in card.text
    assert "| Longest document | 600 tokens |" in card.text
    assert str(pushed.folder.parent) not in str(card), "no directory of this machine"


@in_a_browser
def test_the_page_has_the_numbers_of_the_run(pushed, tmp_path):
    probe = """
    const named = ({ children: [name, value] }) => [name.innerText, value.firstChild.data];
    const facts = [...document.querySelectorAll("#facts div")].map(named);
    const chart = [...document.querySelectorAll(".lines-chart")].find((each) => each.innerText.startsWith("Loss per token"));
    const svg = chart.querySelector("svg");
    chart.scrollIntoView();
    const box = svg.getBoundingClientRect();
    const at = { clientX: box.left + box.width * 0.51, clientY: box.top + 9 };
    svg.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, ...at }));
    const tip = document.getElementById("tip"), said = [...tip.children].map((line) => line.innerText);
    const blocks = () => [...document.querySelectorAll("canvas")].map((canvas) => {
      canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
      return tip.innerText;
    });
    return { facts: Object.fromEntries(facts), headline: document.getElementById("headline").innerText,
             charts: [...document.querySelectorAll(".lines-chart h3")].map((each) => each.innerText),
             tip: said,
             timelines: [...document.querySelectorAll("section > h3")].map((each) => each.innerText),
             canvases: [...document.querySelectorAll("canvas")].map((each) => each.dataset.plot), blocks: blocks(),
             text: document.body.innerText };"""
    page = open_page(browser(), pushed.folder / "report.html", tmp_path, probe)
    assert (page.ready, page.console, page.resources) == ("yes", [], [])
    shown, log = page.answer, [entry for entry in pushed.log if "loss" in entry]
    assert (
        f"6 optimizer steps on 12 documents ({sum(LENGTHS):,} tokens, the longest 600), 2 processes"
        in shown["headline"]
    )
    median = statistics.median
    assert shown["facts"]["tokens per second"] == f"{median(entry['tokens_per_second'] for entry in log):,.0f}"
    assert shown["facts"]["planned: times the lower bound"] == f"{median(entry['plan_balance'] for entry in log):.3f}"
    assert shown["facts"]["peak memory"] == f"{max(entry['peak_memory_gib'] for entry in log):.2f} GiB"
    assert "MFU" not in shown["facts"], "there is no tile of what is not known"
    assert "There is no MFU: the peak of cpu is unknown" in shown["text"]
    assert shown["tip"] == ["Step 3", f"training: {log[2]['loss']:.4g}"]
    assert {"Loss per token", "Training loss by length of document", "Seconds a step"} <= set(shown["charts"])
    record = RunLog.read(pushed.folder).record
    assert [int(title.split()[1].rstrip(":")) for title in shown["timelines"]] == [
        step["step"] for step in record["slowest"]
    ]
    assert len(shown["canvases"]) == 3
    assert all(shown["canvases"])
    assert "Documents" in shown["text"]
    for stored in record["slowest"]:
        plan = plan_of(stored["plan"])
        plan.check(plan.length[np.argsort(plan.doc)])
        row = stored["longest"]
        assert LENGTHS[row["row"]] == row["tokens"]
        assert f"row {row['row']:,} of the data set, {row['tokens']:,} tokens" in shown["text"]
    named = re.findall(r"(?:[Rr]ow |, |: )(\d+)(?:: | \()([\d,]+)(?: token|\))", " ".join(shown["blocks"]))
    assert named, "one name for one document: blocks call it by its row too"
    assert all(LENGTHS[int(row)] == int(tokens.replace(",", "")) for row, tokens in named)
    assert "document " not in " ".join(shown["blocks"]).lower()


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(768, True), (390, False)])
def test_it_fits_a_narrow_screen(pushed, tmp_path, width, dark):
    probe = """
    const tiles = [...document.querySelectorAll("#facts div")].map((tile) => tile.getBoundingClientRect());
    const grid = document.getElementById("facts").getBoundingClientRect(), rows = new Set(tiles.map((tile) => tile.top));
    const ends = [...rows].map((top) => Math.max(...tiles.filter((tile) => tile.top === top).map((tile) => tile.right)));
    return [innerWidth, document.documentElement.scrollWidth, new Set(tiles.map((tile) => Math.round(tile.height))).size,
            ends.every((end) => Math.abs(end - grid.right) < 1)];"""
    page = open_page(browser(), pushed.folder / "report.html", tmp_path, probe, size=(width, 900), dark=dark)
    assert page.console == []
    assert page.answer[:2] == [width, width], "the page itself never scrolls sideways"
    assert page.answer[2:] == [1, True], "tiles are of one height, and every row of them is full"


@in_a_browser
def test_after_an_evaluation_it_is_made_again_with_what_was_found(pushed, tmp_path, capsys):
    from hf_longctx.cli import main

    evaluation = EVALUATION | {"weights": weights_hash(pushed.folder)}
    (pushed.folder / "evaluation.json").write_text(json.dumps(evaluation))
    assert main(["report", str(pushed.folder)]) == 0
    assert "report.html" in capsys.readouterr().out
    probe = """
    const rows = (id) => [...document.querySelectorAll(`#${id} tr`)].map((tr) => [...tr.children].map((cell) => cell.innerText));
    return { heat: rows("retrieval-passkey"), text: document.body.innerText };"""
    page = open_page(browser(), pushed.folder / "report.html", tmp_path, probe)
    assert (page.ready, page.console, page.resources) == ("yes", [], [])
    assert page.answer["heat"] == [["depth", "256 tokens", "512 tokens"], ["0%", "100%", "25%"], ["50%", "75%", "0%"]]
    card = ModelCard.load(pushed.folder / "README.md")
    assert "| passkey | 256 | 7 of 8 |" in card.text
    assert "| 256 to 1,024 | 400 | 2.2500 | 9.488 |" in card.text
    accuracy = {
        result.dataset_name: result.metric_value
        for result in card.data.eval_results
        if result.metric_type == "accuracy"
    }
    assert accuracy == {"passkey at 256 tokens": 0.875, "passkey at 512 tokens": 0.125}


def test_a_report_that_fails_does_not_lose_the_run(tmp_path, capsys):
    chosen = settings(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(chosen))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evaluation.json").write_text("[")
    fresh_accelerator_state()
    run_config(load_config(tmp_path / "config.yaml", ["training.max_steps=1", "longctx.capacity=640"]))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    output = capsys.readouterr().err
    assert "no page of the run: ValueError" in output
    assert "evaluation.json cannot be read" in output.replace("\n", "")
    assert not (tmp_path / "out" / "report.html").exists()


def test_a_page_of_trainers_log_alone(tmp_path):
    log = [{"step": step, "loss": 3 / step, "plan_balance": 1.01} for step in range(1, 5)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    text = write_run_page(tmp_path).read_text()
    assert "4 optimizer steps." in text
    assert "<canvas" not in text
    with pytest.raises(ValueError, match=r"holds no trainer_state.json"):
        write_run_page(tmp_path / "nowhere")
    assert "stages" not in text
    staged = [entry | {"stage_wait": 0.25, "exchanged_mib": 2.0} for entry in log]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": staged}))
    parallelism = {"devices": 8, "planner": "hdp", "sharding": "ddp", "capacity": 64, "pipeline_stages": 4}
    record = {"format": FORMAT, "parallelism": parallelism}
    (tmp_path / "run.json").write_text(json.dumps(record))
    text = write_run_page(tmp_path).read_text()
    assert "4 optimizer steps, 8 processes in 4 pipeline stages." in text
    assert all(
        part in text for part in ("25.0%", "Waiting for other stages", "what stages of a pipeline send each other")
    )
    (tmp_path / "run.json").write_text('{"format": "another"}')
    with pytest.raises(ValueError, match=r"run.json is no record of a run: its format is 'another'"):
        write_run_page(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (1.88, 1.99, [1.85, 1.9, 1.95, 2]),
        (3.0, 3.0, [3, 4, 5]),
        (0, 0, [0, 0.25, 0.5]),
        (-0.2, 0.3, [-0.2, 0, 0.2, 0.4]),
        (0.0, 2.2e-16, [0, 1e-16, 2e-16, 3e-16]),
        (1.25e-13, 2e-13, [1.2e-13, 1.4e-13, 1.6e-13, 1.8e-13, 2e-13]),
        (3e-20, 3e-20, [3e-20, 4e-20, 5e-20]),
        (0, 5e-324, [0, 0.25, 0.5]),
        (1.0, 1.0000000000000002, [1, 1.5, 2]),
    ],
)
def test_marks_of_an_axis_are_round_and_hold_all_values(low, high, expected):
    marks = ticks(low, high)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert len(marks) >= 3
    steps = np.diff(marks)
    np.testing.assert_allclose(steps, steps[0])
    assert marks == pytest.approx(expected)


@pytest.mark.parametrize(
    "ends",
    [
        (10.7, 10.735),
        (1.88, 1.99),
        (0, 5e-5),
        (0.0, 1.25e-3),
        (0, 1_234_567),
        (-0.2, 0.3),
        (0, 2.5),
        (3, 3),
        (0, 3e-14),
    ],
)
def test_a_mark_says_exactly_what_its_line_is_at(ends):
    """A curve through the numbers that are written at the marks meets the lines of the marks."""
    marks = line_chart("", [Curve("", "", list(enumerate(ends)))], "{:g}".format, unit="s")["marks"]
    numbers = [float(mark["text"].removesuffix(" s").replace(",", "")) for mark in marks]
    (line,) = line_chart("", [Curve("", "", list(enumerate(numbers)))], "{:g}".format)["lines"]
    heights = [float(y) for y in re.findall(r"[ML]\S+ ([\d.]+)", line["path"])]
    assert heights == pytest.approx([mark["at"] for mark in marks], abs=0.006), "paths have two decimals"
    assert len({mark["text"] for mark in marks}) == len(marks) >= 3


@pytest.mark.parametrize(
    ("first", "last", "doubling", "expected"),
    [
        (1, 12, False, [1, 3, 6, 9, 12]),
        (0, 63, True, [0, 16, 32, 48, 63]),
        (1, 4000, False, [1, 1000, 2000, 3000, 4000]),
        (0, 1, True, [0, 1]),
        (7, 7, False, [7]),
    ],
)
def test_places_along_an_axis_are_whole_and_far_enough_from_each_other(first, last, doubling, expected):
    assert whole_numbers(first, last, doubling=doubling) == expected


def test_a_length_has_its_colour_in_every_run_and_no_other_has_it(tmp_path):
    buckets = ["to_256", "to_1K", "to_4K", "to_16K", "to_64K", "to_256K", "to_1M", "over_1M"]

    def colours(names):
        log = [{"step": 1} | {f"loss_by_length/{name}": 2.0 for name in names}]
        (chart,) = charts(log)
        return {entry["text"].replace(" ", "_"): entry["colour"] for entry in chart["legend"]}

    every = colours(reversed(buckets))
    assert list(every) == buckets, "from short to long"
    assert colours(["to_4K", "to_256"]) == {name: every[name] for name in ("to_256", "to_4K")}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0}]}))
    style = re.search(r"<style>(.*?)</style>", write_run_page(tmp_path).read_text(), re.DOTALL).group(1)
    themes = re.findall(r"--measured:[^}]*}", style)
    assert len(themes) == 2, "light and dark"
    for theme in themes:
        values = dict(re.findall(r"--([\w-]+): (#\w+)", theme))
        assert set(every.values()) < set(values)
        assert len(set(values.values())) == len(values)


def test_what_went_wrong_looks_like_an_alarm(tmp_path):
    first = {"step": 1, "eval_loss": 2.0}
    last = {"step": 2, "eval_loss": 2.0, "prediction_error": 0.1, "failed_saves": 0, "skipped_steps": 0}
    for changed, alarms in (
        ({}, []),
        ({"prediction_error": 9.0}, ["measured / planned"]),
        ({"prediction_error": -0.8, "failed_saves": 2}, ["measured / planned", "failed saves"]),
        ({"skipped_steps": 1, "eval_loss": 2.5}, ["held-out loss", "skipped steps"]),
    ):
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [first, last | changed]}))
        text = write_run_page(tmp_path).read_text()
        assert re.findall(r'<div class="alarm"><dt>(.*?)</dt>', text) == alarms


def test_a_long_curve_is_thinned_to_its_means():
    points = [(step, float(step)) for step in range(1, 10 * MOST_POINTS + 1)]
    chart = line_chart("", [Curve("", "c0", points)], "{:g}".format)
    shown = chart["values"]["series"][0][1]
    assert len(shown) == MOST_POINTS
    assert shown[0] == "5.5"
    assert chart["places"][-1] == {"at": 100, "text": "4,000"}
    assert line_chart("", [Curve("", "c0", [])], "{:g}".format) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"hub_token": TOKEN}, {"hub_token": HIDDEN}),
        (
            {"wandb_api_key": "x", "max_tokens": 7, "seed": None},
            {"wandb_api_key": HIDDEN, "max_tokens": 7, "seed": None},
        ),
        ({"eos_token": "</s>", "added_tokens": ["<x>"]}, {"eos_token": "</s>", "added_tokens": ["<x>"]}),
        ({"password": 12345, "enough_tokens": 12345}, {"password": HIDDEN, "enough_tokens": 12345}),
        (["a", {"storage": {"aws_secret_access_key": "x"}}], ["a", {"storage": {"aws_secret_access_key": HIDDEN}}]),
        ("https://me:secret@host/x.jsonl", "https://host/x.jsonl"),
        ("s3://bucket/x?X-Amz-Signature=ab12&part=2", f"s3://bucket/x?X-Amz-Signature={HIDDEN}&part=2"),
        (f"login with {TOKEN} now", f"login with {HIDDEN} now"),
        ("AKIAABCDEFGHIJKLMNOP", HIDDEN),
        ("runs/tokens/at@home", "runs/tokens/at@home"),
        (list(range(30)), [*range(20), "... and 10 more"]),
    ],
)
def test_secrets_are_hidden_and_nothing_else(value, expected):
    assert redacted(value) == expected
