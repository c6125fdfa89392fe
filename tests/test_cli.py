"""The command line: help without torch, verbs on every kind of data, errors that say what would be valid."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_longctx import cli
from hf_longctx.commands.shared.costs import read_device
from hf_longctx.hardware.profile import Point, Profile
from hf_longctx.planner import PLANNERS, CostModel, GlobalBatches, Topology, plan_step, planners_for
from hf_longctx.report.pictures.canvas import short_bytes
from hf_longctx.simulator.lengths import DISTRIBUTIONS
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import documents
from tests.worlds.patience import PATIENCE

LENGTHS = np.random.default_rng(0).integers(2, 300, 60)
RANKS = ("--ranks", "4", "--capacity", "100")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a configuration and a tokenizer of one token per word."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return str(tmp_path / "lengths.npy")


@pytest.fixture
def plan(model: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `plan` and gives its output's lines; `--model`, `--device` and ranks are given unless they are overridden."""

    def run(data: str, *options: str) -> list[str]:
        code = cli.main(["plan", data, *RANKS, "--model", model, "--device", "cpu", *options])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out.splitlines()

    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what is said of a user's mistake, in one line; without a traceback."""
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown.err).split())


def rows(table: list[str]) -> dict[str, list[str]]:
    """Planner -> cells: columns are apart by two spaces or more."""
    header = next(i for i, line in enumerate(table) if line.startswith("planner"))
    return {name: cells for name, *cells in (re.split(r"  +", line) for line in table[header + 1 :]) if len(cells) == 8}


# Program


@pytest.mark.processes
def test_help_is_shown_without_a_verb_and_needs_no_torch():
    program = (
        "import sys\nfrom hf_longctx.cli import main\nassert main([]) == main(['--help']) == main(['plan', '-h']) == 0\n"
        "assert not {'torch', 'transformers', 'datasets', 'numba'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    for verb in ("plan", "profile", "kernels"):
        assert f" {verb} " in ran.stdout
    ran = subprocess.run(
        [sys.executable, "-m", "hf_longctx"], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Usage: hf-longctx [OPTIONS] COMMAND" in ran.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "argument", "message"),
    [
        (["-OO"], "a", "error: Python leaves docstrings out (-OO, or PYTHONOPTIMIZE=2), and transformers cannot be "),
        (
            ["-X", "utf8=0"],
            "model.path=ö",
            r"error: argument 'model.path=\udcc3\udcb6': Python reads arguments as ascii",
        ),
    ],
)
def test_a_python_that_libraries_cannot_run_in_is_refused(options, argument, message):
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    program = [sys.executable, *options, "-m", "hf_longctx", "train", "no.yaml", argument]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr
    assert ". Valid: " in ran.stderr


def test_wrong_verbs_and_options_are_named(capsys: pytest.CaptureFixture[str], lengths: str):
    assert "No such command 'kernel'. Did you mean 'kernels'?" in refused(capsys, "kernel")
    assert "Missing option '--ranks'" in refused(capsys, "plan", lengths, "--capacity", "8")
    assert "Invalid value for '--ranks'" in refused(capsys, "plan", lengths, "--ranks", "0", "--capacity", "8")


def test_a_rank_that_ctrl_c_ends_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_longctx.config.load_config", interrupted)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    assert cli.main(["train", "any.yaml"]) == 130
    assert sys.last_value is not None, "attention/exchange.py waits at exit for all ranks where nothing has failed"


def test_a_traceback_is_shown_on_demand(model: str):
    with pytest.raises(ValueError, match="DATA is 'nowhere'"):
        cli.main(["--traceback", "plan", "nowhere", *RANKS, "--model", model])


def test_a_rank_stands_for_the_stages_of_a_pipeline(plan: Any, lengths: str):
    options = ("--documents", "20", "--planner", "hdp", "--mode", "pipeline")
    ranks = int(RANKS[RANKS.index("--ranks") + 1])
    assert f"on {ranks} x cpu, " in plan(lengths, *options)[0]
    assert f"on {ranks} x 2 stages, {2 * ranks} x cpu, " in plan(lengths, *options, "--stages", "2")[0]


# Data


def test_every_kind_of_data_gives_the_same_documents(plan: Any, lengths: str, tmp_path: Path):
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    table = Dataset.from_list(documents(LENGTHS.tolist()))
    table.save_to_disk(tmp_path / "table")
    DatasetDict({"test": table}).save_to_disk(tmp_path / "splits")
    table.to_json(tmp_path / "table.jsonl")
    table.to_parquet(tmp_path / "table.parquet")
    text = tmp_path / "text.json"
    text.write_text("".join(json.dumps({"body": "word " * int(length)}) + "\n" for length in LENGTHS))
    expected = plan(lengths, "--documents", "50", "--planner", "hdp")[1]
    assert expected.startswith("50 documents, ")
    for data, *options in (
        ["lengths.txt"],
        ["table"],
        ["splits", "--split", "test"],
        ["table.jsonl"],
        ["table.parquet"],
        ["text.json", "--text-column", "body"],
    ):
        assert plan(str(tmp_path / data), "--documents", "50", "--planner", "hdp", *options)[1] == expected


@pytest.mark.parametrize("name", ["github", "byted", "lognormal_pareto", "agent-trajectories"])
def test_as_many_documents_as_are_wanted_are_drawn_of_a_distribution(name: str, plan: Any):
    [described] = plan(name, "--documents", "300", "--steps", "2", "--planner", "hdp")[1:2]
    assert described.startswith("600 documents, ")
    assert described.endswith("in 2 of the epoch's 2 steps")
    assert int(re.search(r"longest ([\d,]+)", described)[1].replace(",", "")) <= 400  # type: ignore[index]
    [described] = plan(name, "--tokens", "50000", "--longest-document", "200", "--planner", "hdp")[1:2]
    assert 49_800 <= int(re.search(r"([\d,]+) tokens", described)[1].replace(",", "")) <= 50_000  # type: ignore[index]


def test_a_document_that_no_rank_can_hold_is_named_by_its_row_in_whichever_step_it_is(
    plan: Any, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
):
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["50"] * 6 + ["900", "50"]) + "\n")
    longest = f"row 6 of {file} has 900 tokens; 4 ranks x 100 tokens of capacity hold 400. It needs a capacity >= 225"
    one = ("--documents", "1", "--planner", "hdp")
    assert any(line.startswith(longest) and "training refuses it" in line for line in plan(str(file), *one))
    arguments = ("plan", str(file), *RANKS, "--model", model, "--device", "cpu", *one, "--steps", "8")
    assert longest in refused(capsys, *arguments)
    assert all("training refuses it" not in line for line in plan(str(file), *one, "--long-documents", "split"))


def test_every_distribution_is_named_in_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert cli.main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in DISTRIBUTIONS if name not in shown] == []


def test_data_that_cannot_be_read_is_named_with_what_can(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
):
    def reply(data: str, *options: str) -> str:
        return refused(capsys, "plan", str(tmp_path / data), *RANKS, "--model", model, *options)

    (tmp_path / "words.txt").write_text("12\nmany\n")
    (tmp_path / "broken.jsonl").write_text('{"input_ids": [1, 2}\n')
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "floats.npy", np.ones(3))
    np.save(tmp_path / "negative.npy", np.array([5, -1]))
    Dataset.from_dict({"text": ["a b"], "stars": [1]}).to_parquet(tmp_path / "text.parquet")
    Dataset.from_dict({"input_ids": [["a", "b"]]}).to_parquet(tmp_path / "strings.parquet")

    missing = reply("missing.jsonl")
    for part in (
        f"it must be a distribution ({', '.join(DISTRIBUTIONS)})",
        "(.npy, .txt)",
        ".jsonl, .ndjson, .json, .parquet",
    ):
        assert part in missing
    assert "many" in reply("words.txt")
    assert "one length in tokens per document" in reply("words.txt")
    assert "holds float64 of shape (3,); it must hold one length" in reply("floats.npy")
    assert "negative.npy: document 1 has -1 tokens; it must hold one length" in reply("negative.npy")
    (tmp_path / "nothing.npy").touch()
    assert "nothing.npy: No data left in file; it must hold one length" in reply("nothing.npy")
    np.save(tmp_path / "unsigned.npy", np.array([2**63 + 5, 3], dtype=np.uint64))
    assert f"document 0 has {2**63 + 5} tokens" in reply("unsigned.npy")
    for options in (("--ranks", "1000000000"), ("--capacity", "999999999999")):
        assert f"{' '.join(options)} is more than plans are made for; valid: 1 to" in reply("floats.npy", *options)
    assert "broken.jsonl, line 1: is not JSON" in reply("broken.jsonl")
    assert "doesn't contain any data files" in reply("empty")
    (tmp_path / "untold").mkdir()
    tiny_llama().config.save_pretrained(tmp_path / "untold")
    assert "untold' has no tokenizer" in reply("text.parquet", "--model", str(tmp_path / "untold"))
    assert "the columns are 'text', 'stars'; valid" in reply("text.parquet", "--text-column", "body")
    assert "row 1: column 'input_ids' holds ['a', 'b']" in reply("strings.parquet")
    Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(tmp_path / "table")
    assert "no source has the split 'test', only 'train'" in reply("table", "--split", "test")


# plan


def test_the_table_is_what_the_plans_say(plan: Any, lengths: str, model: str):
    shown = plan(lengths, "--documents", "20", "--steps", "2", "--seed", "5", "--ranks-per-node", "2")
    assert shown[0] == f"{lengths}, {model} on 4 x cpu, 100 tokens per rank, async"
    table = rows(shown)
    topology = Topology(4, 100, ranks_per_node=2)
    speed = read_device("cpu").speed
    cost = CostModel.from_config(tiny_llama().config, speed, ranks_per_node=2, world_size=4)
    epoch = GlobalBatches(LENGTHS, 5, documents=20).epoch(0)
    assert shown[1].startswith("40 documents, ")
    assert shown[1].endswith("in 2 of the epoch's 3 steps")
    summaries = [plan_step(LENGTHS[batch], topology, cost, "async").summary() for batch in epoch[:2]]
    makespan = sum(summary.makespan for summary in summaries)
    step, bound, idle, exchanged, split, *_ = table["hdp"]
    assert step == f"{makespan / 2e6:.3g} ms"
    assert bound == f"{makespan / sum(summary.lower_bound for summary in summaries):.3f}"
    assert float(idle.removesuffix("%")) == pytest.approx(100 * np.mean([s.idle_share for s in summaries]), abs=1)
    assert split == str(sum(summary.split_documents for summary in summaries))
    config = tiny_llama().config
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert exchanged == short_bytes(elements * speed.activation_bytes * sum(s.exchanged_tokens for s in summaries) // 2)


def test_static_context_parallelism_has_one_degree_for_all_steps(plan: Any, tmp_path: Path):
    # That of the longest document of the data, although no step that is planned has it; one that no ranks hold counts as what
    # all of them hold.
    for longest in (400, 900):
        lengths = np.array([50] * 20 + [longest])
        (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
        firsts = [GlobalBatches(lengths, seed, documents=5).epoch(0)[0] for seed in range(9)]
        seed, batch = next((seed, batch) for seed, batch in enumerate(firsts) if lengths[batch].max() == 50)
        topology = Topology(4, 100, ranks_per_node=2)
        cost = CostModel.from_config(tiny_llama().config, read_device("cpu").speed, ranks_per_node=2, world_size=4)
        times = [
            planner(lengths[batch], topology, cost, "async").summary().makespan
            for planner in (planners_for(400)["static_cp"], PLANNERS["static_cp"])
        ]
        assert times[0] != times[1]
        options = ("--documents", "5", "--seed", str(seed), "--ranks-per-node", "2", "--planner", "static_cp")
        shown = plan(str(tmp_path / "lengths.txt"), *options)
        assert rows(shown)["static_cp"][0] == f"{times[0] / 1e6:.3g} ms"


def test_each_planner_has_a_row_or_says_why_not(plan: Any, lengths: str):
    shown = plan(lengths)
    table = rows(shown)
    unable = {line.partition(":")[0] for line in shown if ": document " in line}
    assert table.keys() | unable == set(PLANNERS)
    assert "dp_packing" in unable  # some documents need several ranks
    assert rows(plan(lengths, "--planner", "static_cp")).keys() == {"static_cp"}
    assert "lockstep" in plan(lengths, "--planner", "hdp", "--mode", "lockstep")[0]


def test_long_documents_are_cut_as_training_would(
    plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
):
    (tmp_path / "lengths.txt").write_text("50 1000 30".replace(" ", "\n"))
    data = str(tmp_path / "lengths.txt")
    message = refused(capsys, "plan", data, *RANKS, "--model", model, "--planner", "hdp")
    assert "1000 tokens" in message
    assert "400" in message
    message = refused(capsys, "plan", data, *RANKS, "--model", model, "--longest-document", "300")
    assert "document 1 has 1000 tokens, more than longest_document=300" in message
    assert "3 documents, 480 tokens" in plan(data, "--long-documents", "truncate", "--planner", "hdp")[1]
    shown = plan(data, "--long-documents", "split", "--longest-document", "300", "--tokens", "2000", "--planner", "hdp")
    assert shown[1].startswith("6 documents, 1,080 tokens")


def test_what_is_cut_is_said(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path):
    (tmp_path / "lengths.txt").write_text("50\n1000\n30")
    options = ("--model", model, "--planner", "hdp", "--long-documents", "truncate")
    assert cli.main(["plan", str(tmp_path / "lengths.txt"), *RANKS, *options]) == 0
    message = capsys.readouterr().err
    assert message.startswith(
        "warning: 1 of 3 documents are longer than 400 tokens (longest_document) and are truncated"
    )
    assert message.count("\n") == 1


def test_a_profile_is_a_device(plan: Any, lengths: str, tmp_path: Path):
    measured = Profile(
        speed=read_device("cpu").speed,
        points=(Point("optimizer", (), 1, 1.0),),
        predicted_seconds=(1.0,),
        clock="wall",
        device="test",
        backend="none",
        world_size=4,
        ranks_per_node=4,
        threads=1,
        precision="float32",
        device_bytes=1,
        host_bytes=1,
        model={},
        versions={},
    )
    measured.save(tmp_path / "profile.json")
    row = rows(plan(lengths, "--device", str(tmp_path / "profile.json"), "--planner", "hdp"))["hdp"]
    assert row[:-1] == rows(plan(lengths, "--planner", "hdp"))["hdp"][:-1]  # the last cell is a measured time


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--documents", "5", "--tokens", "9"], ["--documents 5 and --tokens 9 both say", "give one of them"]),
        (["--planner", "best"], ["--planner 'best' is unknown; valid: all, hdp"]),
        (["--device", "tpu"], ["--device 'tpu' is unknown; valid: ", "h100", "hf-longctx profile"]),
        (["--device", "missing.json"], ["missing.json' cannot be read"]),
        (["--model", "missing/model/"], ["--model 'missing/model/' is no preset (llama-7b"]),
        (["--stages", "2"], ["--stages 2 is for --mode pipeline, not async"]),
        (["--mode", "sync"], ["--mode", "'async', 'lockstep'"]),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], lengths: str, model: str
):
    message = refused(capsys, "plan", lengths, *RANKS, "--model", model, *options)
    for part in parts:
        assert part in message


def test_a_page_a_picture_and_a_trace_are_written(plan: Any, lengths: str, tmp_path: Path):
    shown = plan(lengths, "--output", str(tmp_path / "new" / "pictures"))
    files = [tmp_path / "new" / "pictures" / name for name in ("plan.html", "plan.png", "trace.json")]
    assert shown[-3:] == [f"written: {file}" for file in files]
    assert "<html" in files[0].read_text()
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files[2].read_text())
