"""`hf-longctx simulate`: runs that follow from a cluster and a model, planners side by side, sweeps, and what is refused."""

from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from matplotlib.image import imread

from hf_longctx.commands.estimate import estimate
from hf_longctx.commands.shared.tokens import size_of
from hf_longctx.commands.simulate import Simulated, read_axes, simulate, sweep_table
from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.hardware.profile import Profile
from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.hardware.speeds import CPU_CORE
from hf_longctx.planner import PLANNERS, planners_for
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.report.pictures.sweep_picture import Point, draw_sweep, sweep_figure
from hf_longctx.report.planner_names import planner_name
from hf_longctx.simulator.lengths import draw_tokens
from hf_longctx.simulator.machine import Loader
from hf_longctx.simulator.sweep import Run, runs, simulate_planners

LLAMA_7B, H100 = ARCHITECTURES["llama-7b"], CLUSTERS["h100"]
NAMES = list(PLANNERS)


def test_a_run_follows_from_cluster_and_model():
    run = Run(LLAMA_7B, H100, 64, 2**17)
    assert (run.ranks, run.mode, run.machine.ranks_per_node) == (64, "async", 8)
    assert run.tokens_per_rank % 256 == 0
    assert run.memory.peak(run.tokens_per_rank) <= 0.9 * H100.device_bytes < run.memory.peak(run.tokens_per_rank + 256)
    again = replace(run, recompute=True)
    assert again.tokens_per_rank > 5 * run.tokens_per_rank
    head = run.cost.label_ps
    assert again.cost.label_ps == head
    assert again.cost.linear_ps == pytest.approx((run.cost.linear_ps - head) * 4 / 3 + head, rel=1e-3)
    pipeline = Run(ARCHITECTURES["llama-70b"], H100, 512, 2**17, tensor_parallel=8, stages=4, recompute=True)
    assert (pipeline.ranks, pipeline.mode, pipeline.machine.ranks_per_node) == (16, "pipeline", 1)
    assert pipeline.topology.stages == 4
    assert Run(LLAMA_7B, H100, 64, 2**17, sharding="zero3").mode == "lockstep"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"devices": 60, "tensor_parallel": 8},
            r"60 devices do not divide by tensor_parallel=8 \* stages=1 = 8; valid: 56 or 64",
        ),
        ({"devices": 64, "stages": 2, "sharding": "zero3"}, r"'zero3' with stages=2; a pipeline takes ddp or zero1"),
        (
            {"devices": 8, "context": 2**21},
            r"2097152 tokens does not fit 8 ranks x \d+ tokens = \d+; it needs >= \d+ devices",
        ),
        (
            {"devices": 8, "capacity": 10**6},
            r"a capacity of 1000000 tokens takes [\d.]+ of 79.6 GiB without .* at most \d+ fit",
        ),
        ({"devices": 64, "tensor_parallel": 16}, r"tensor_parallel=16 must divide"),
        (
            {"devices": 64, "schedule": Schedule("gpipe")},
            r"schedule='gpipe' with stages=1: there is no pipeline; valid: st",
        ),
    ],
)
def test_runs_that_cannot_be_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Run(LLAMA_7B, H100, **{"context": 2**15} | settings)


def test_recomputation_is_chosen_where_it_is_faster_or_the_only_way():
    common = {"config": LLAMA_7B, "cluster": H100, "devices": 64}
    assert [run.recompute for run in runs(context=2**17, **common)] == [False, True]
    assert [run.recompute for run in runs(context=2**20, **common)] == [True]
    assert [run.recompute for run in runs(context=2**17, recompute=False, **common)] == [False]
    with pytest.raises(ValueError, match=r"does not fit 64 ranks .* with recomputation"):
        runs(context=2**24, **common)
    both = runs(context=2**17, **common)
    batches = [draw_tokens("github", 2**22, seed, 2**17) for seed in range(2)]
    (best,), _ = simulate_planners(both, batches, ["static_cp"])
    outcomes = [simulate_planners([run], batches, ["static_cp"])[0][0] for run in both]
    assert best.tokens_per_second == max(outcome.tokens_per_second for outcome in outcomes)
    assert best.run is max(zip(outcomes, both), key=lambda pair: pair[0].tokens_per_second)[1]


def test_planners_are_compared_on_the_same_documents():
    run = Run(LLAMA_7B, H100, 64, 2**17)
    batches = [draw_tokens("github", 2**22, seed, 2**17) for seed in range(3)]
    outcomes, refused = simulate_planners([run], batches, NAMES, Loader())
    assert [outcome.planner for outcome in outcomes] == [name for name in NAMES if name != "dp_packing"]
    assert "holds every document on one rank" in str(refused["dp_packing"])
    for outcome in outcomes:
        assert [played.tokens for played in outcome.played] == [int(lengths.sum()) for lengths in batches]
        seconds = [played.seconds for played in outcome.played]
        assert outcome.seconds == pytest.approx(np.mean(seconds))
        assert outcome.tokens_per_second == pytest.approx(sum(lengths.sum() for lengths in batches) / sum(seconds))
        assert 0 < outcome.mfu < 1
        assert outcome.idle_share + outcome.exposed_share < 1
        assert outcome.memory <= H100.device_bytes
    assert outcomes[0].planner == "hdp"
    assert outcomes[0].tokens_per_second > 1.5 * max(outcome.tokens_per_second for outcome in outcomes[1:])
    short = planners_for(run.context)["static_cp"](np.array([1000, 2000]), run.topology, run.cost)
    assert short.members.tolist() == [next(d for d in (1, 2, 4, 8, 16, 32, 64) if d * run.tokens_per_rank >= 2**17)]
    with pytest.raises(ValueError, match="holds every document on one rank"):
        simulate_planners([run], batches, ["dp_packing"])


def test_sizes_and_axes():
    assert [size_of(text, "--x") for text in ("7", "256K", "2M", "1m", "1_000")] == [7, 2**18, 2**21, 2**20, 1000]
    for wrong in ("", "M", "0", "-1", "2.5M", "2G", "two", "2000000M"):
        with pytest.raises(
            ValueError, match=rf"--tokens '{wrong}' is no number of tokens; valid: .* 262144, 256K or 2M"
        ):
            size_of(wrong, "--tokens")
    assert read_axes(["gpus=8,16", "context=256K,1M"]) == {"gpus": [8, 16], "context": [2**18, 2**20]}
    for wrong in ("gpus", "gpus=", "ranks=8", "=8"):
        with pytest.raises(ValueError, match=rf"--sweep '{wrong}'; valid: gpus=VALUE,VALUE... or context=VALUE"):
            read_axes([wrong])
    with pytest.raises(ValueError, match="--sweep has gpus twice"):
        read_axes(["gpus=8", "gpus=16"])


def defaults_of(verb: Any) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in signature(verb).parameters.items()
        if parameter.default is not Parameter.empty
    }


def run_verb(**options: Any) -> None:
    simulate(**defaults_of(simulate) | {"gpus": 16, "context": "64K", "tokens": "512K", "steps": 1} | options)


def test_every_option_of_the_verb_is_explained():
    hints = get_type_hints(simulate, include_extras=True)
    for name, hint in hints.items():
        if name != "return":
            assert get_origin(hint) is Annotated, name
            assert get_args(hint)[1].help, name


def test_the_verb_shows_planners_side_by_side_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_verb(output=tmp_path / "run.html")
    shown = capsys.readouterr().out
    header = next(line for line in shown.splitlines() if line.startswith("GPUs"))
    assert [word in header for word in ("tokens/s", "x static", "MFU", "step", "idle", "exposed", "memory")] == [
        True
    ] * 7
    rows = [line.split() for line in shown.splitlines() if any(name in line.split() for name in NAMES)]
    assert len(rows) == len(NAMES)
    assert rows[0][:3] == ["16", "65,536", "hdp"]
    static = next(row for row in rows if "static_cp" in row)
    assert static[static.index("static_cp") + 2] == "1.00"
    assert any(row[-1] == "bytes" for row in rows if "dp_packing" in row)  # it exchanges nothing
    assert "simulated step" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    ("cluster", "dtype", "in_header", "note"),
    [
        ("h100", "auto", "mixed", False),
        ("h100", "bfloat16", "bfloat16", False),
        ("h200", "float32", "float32", True),
        ("profile", "auto", "float32", False),
        ("profile", "mixed", "mixed", True),
    ],
)
def test_memory_is_that_of_estimate(cluster, dtype, in_header, note, tmp_path: Path, monkeypatch, capsys):
    """Tokens of a rank are those that fit by `estimate`, in each precision; plans are of no interest here."""
    if cluster == "profile":
        speed = replace(CPU_CORE, activation_bytes=4)
        cluster = str(tmp_path / "profile.json")
        Profile(speed, (), (), "wall", "a CPU", "gloo", 8, 8, 1, "float32", 2**37, 2**40, {}, {}).save(cluster)
    shown: list[Any] = []
    monkeypatch.setattr("hf_longctx.commands.estimate.memory_table", lambda results: shown.extend(results) or "")
    estimate(
        **defaults_of(estimate) | {"model": "llama-7b", "context": "16K", "gpus": 8, "device": cluster, "dtype": dtype}
    )
    capacities = {result.sharding: result.capacity for result in shown}
    simulated: list[Run] = []

    def play_nothing(choices: list[Run], *_: Any) -> tuple[list[Any], dict[str, ValueError]]:
        simulated.extend(choices)
        return [], {}

    monkeypatch.setattr("hf_longctx.simulator.sweep.simulate_planners", play_nothing)
    capsys.readouterr()
    for sharding in ("zero1", "zero3"):
        run_verb(
            model="llama-7b", gpus=8, context="16K", cluster=cluster, dtype=dtype, sharding=sharding, recompute=True
        )
        printed = capsys.readouterr().out
        assert f", {sharding}, dtype {in_header}\n" in printed
        assert ("speeds and bytes sent are those of" in printed) == note
        tokens = capacities[sharding]
        assert simulated.pop().tokens_per_rank == (tokens // 256 * 256 or tokens) > 0


def test_a_run_of_a_paper_is_in_its_precision():
    """All in bfloat16, beside it Adam's float32 master and moments: 16 bytes of a weight in all."""
    run = Run(LLAMA_7B, H100, 64, 2**17, sharding="zero3", recompute=True)
    whole = MemoryModel.from_config(LLAMA_7B, sharding="zero3", world_size=64, checkpointing=True)
    papers = {"weight_bytes": 2, "gradient_bytes": 2, "activation_bytes": 2, "optimizer_bytes": 12}
    assert (
        run.memory
        == whole
        == MemoryModel.from_config(LLAMA_7B, sharding="zero3", world_size=64, checkpointing=True, **papers)
    )


def test_the_verb_plays_schedules(capsys: pytest.CaptureFixture[str]):
    """Alike documents in two stages: as long a step, but 1F1B holds less; with two stages on a device the way is half as long."""
    seconds = {}
    for schedule, virtual in (("1f1b", 1), ("interleaved", 2), ("gpipe", 1)):
        batches = [np.full(64, 8192)]
        run = Run(LLAMA_7B, H100, 16, 8192, stages=2, capacity=8192, schedule=Schedule(schedule, virtual))
        seconds[schedule] = simulate_planners([run], batches, ["hdp"])[0][0].seconds
        run_verb(stages=2, schedule=schedule, virtual_stages=virtual, planner="hdp")
        shown = capsys.readouterr().out
        assert ("2 stages" in shown, schedule in shown) == (True, schedule != "1f1b")
        assert ("are those of 1f1b; gpipe holds" in shown) == (schedule == "gpipe")
    assert seconds["1f1b"] == seconds["gpipe"]
    assert seconds["interleaved"] < 0.98 * seconds["1f1b"]


def test_the_verb_sweeps_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_verb(sweep=["gpus=16,32"], axes=["context=64K,64M"], planner="hdp", output=tmp_path / "sweep.png")
    shown = capsys.readouterr().out
    assert sum("hdp" in line for line in shown.splitlines()) == 2
    assert "16 GPUs, 67,108,864 tokens: a context of 67108864 tokens does not fit 16 ranks" in shown
    assert imread(tmp_path / "sweep.png").shape[1] == 1600


@pytest.mark.filterwarnings("ignore:.*are truncated to their first 2048")
def test_the_verb_takes_a_users_documents_and_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(2, 3000, 500))
    speed = replace(CPU_CORE, activation_bytes=4)
    sizes: dict[str, int | str] = {}
    profile = Profile(speed, (), (), "wall", "a CPU", "gloo", 4, 4, 1, "float32", 2**37, 2**39, sizes, {})
    profile.save(tmp_path / "profile.json")
    run_verb(
        distribution=str(tmp_path / "lengths.npy"),
        cluster=str(tmp_path / "profile.json"),
        gpus=4,
        context="2K",
        tokens="20K",
        steps=2,
    )
    shown = capsys.readouterr().out
    assert [name for name in NAMES if any(name in line.split() for line in shown.splitlines())] == NAMES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planner": "best"}, r"--planner 'best' is unknown; valid: all, hdp, static_cp"),
        ({"attention": "flash_attn_4"}, r"attention by 'flash_attn_4' on h100 is not known; valid: .*flash_attn_3"),
        ({"cluster": "gb300"}, r"--cluster 'gb300' is unknown; valid: a100, h100, .*or a .json file"),
        ({"output": Path("x.png")}, r"--output x.png must end in .html without --sweep"),
        ({"sweep": ["gpus=8"], "output": Path("x.html")}, r"--output x.html must end in .png with --sweep"),
        ({"axes": ["gpus=8,16"]}, r"gpus=8,16 is an axis of --sweep: write --sweep gpus=8,16"),
        ({"tokens": "many"}, r"--tokens 'many' is no number of tokens"),
        ({"gpus": 4, "context": "64M"}, r"a context of 67108864 tokens does not fit 4 ranks"),
        ({"sweep": ["gpus=1,2"], "context": "64M"}, r"not a single token fits: weights"),
    ],
)
def test_what_the_verb_refuses(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        run_verb(**options)


def test_a_sweeps_picture_has_a_panel_for_each_value_of_the_shorter_axis(tmp_path: Path):
    points = [
        Point(devices, context, planner, devices * 1e3 / context * (1 + (planner == "hdp")), 0.1)
        for devices in (8, 16, 32)
        for context in (2**18, 2**19)
        for planner in ("hdp", "static_cp")
        if (devices, planner) != (8, "static_cp")
    ]
    figure = sweep_figure(points, "title")
    assert [panel.get_title() for panel in figure.axes[:2]] == ["256K tokens of context", "512K tokens of context"]
    assert len(figure.axes) == 4
    hdp, static = figure.axes[0].get_lines()
    assert hdp.get_xdata().tolist() == [8, 16, 32]
    assert static.get_xdata().tolist() == [16, 32]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [f"{planner_name('hdp')} (ours)", planner_name("static_cp")]
    everybody = sweep_figure([replace(points[0], planner=name) for name in PLANNERS], "title")
    everybody.draw_without_rendering()
    legend, whole = everybody.legends[0].get_window_extent(), everybody.bbox
    assert whole.x0 <= legend.x0 < legend.x1 <= whole.x1, "all names are in the picture"
    assert len({line.get_color() for line in everybody.axes[0].get_lines()}) == len(PLANNERS)
    colours = {line.get_label(): line.get_color() for line in everybody.axes[0].get_lines()}
    assert [hdp.get_color(), static.get_color()] == [colours[name] for name in names], "whoever else is drawn"
    along_context = [replace(point, devices=8) for point in points if point.devices == 16]
    assert sweep_figure(along_context, "title").axes[0].get_title() == "8 devices"
    draw_sweep(points[:1], tmp_path / "one.png", "title")
    assert imread(tmp_path / "one.png").std() > 0


def test_the_table_shows_no_share_below_nothing():
    """A rank that is never idle has a share of rounding alone."""
    run = SimpleNamespace(tokens_per_rank=8, recompute=False)
    shares = {"idle_share": -1e-9, "exposed_share": 0.25, "mfu": 0.5}
    numbers = {"tokens_per_second": 1.0, "seconds": 1.0, "memory": 1, "bytes_of": lambda where: 0}
    outcome: Any = SimpleNamespace(planner="hdp", run=run, **shares, **numbers)
    columns = {column.header: list(column.cells) for column in sweep_table([Simulated(2, 8, [outcome], {})]).columns}
    assert (columns["idle"], columns["exposed"]) == (["0.0%"], ["25.0%"])
