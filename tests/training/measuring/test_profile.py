"""A profile measures every part on all ranks, predicts what it measured, and is what trainer and command line take."""

import json
import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4TextConfig, JetMoeConfig
from typer import Typer
from typer.testing import CliRunner

from hf_longctx import LongContextPlugin
from hf_longctx.commands import profile as command
from hf_longctx.hardware.profile import Point, Profile
from hf_longctx.planner import CostModel, Topology
from hf_longctx.planner.cost.calibration import fit_speed, predict
from hf_longctx.precision import cpu_core, cpu_kind
from hf_longctx.training.measuring import rank_profile as profile_module
from hf_longctx.training.measuring.rank_profile import ProfileSettings, cases, profile_model, suited
from hf_longctx.training.measuring.step_costs import cost_model
from tests.builders.tiny_models import FAMILIES, TINY, tiny_llama
from tests.worlds.fifo import in_order_communicators
from tests.worlds.launched import ROOT, Ended, accelerate_launch, run, torchrun

CPU = torch.device("cpu")
QUICK = ProfileSettings(longest=256, seconds=0.5)


def profiled(family: str, settings: ProfileSettings, in_order: bool = False) -> Profile:
    config = FAMILIES[family](torch.float32).config
    with in_order_communicators() if in_order else nullcontext():
        return profile_model(config, CPU, settings)


def kinds(profile: Profile) -> set[tuple[str, int]]:
    return {(point.part, point.ranks) for point in profile.points}


@pytest.mark.parametrize("family", ["llama", "mixtral", "mistral", "bloom", "mpt"])
def test_one_process_measures_what_one_rank_does(family):
    profile = profiled(family, QUICK)
    assert kinds(profile) == {("micro_batch", 1), ("attention", 1), ("optimizer", 1)}
    held_out = [point for point in profile.points if point.held_out]
    assert {point.lengths for point in held_out} >= {(48,), (96, 32)}, "lengths and packs that nothing is fitted to"
    config = FAMILIES[family](torch.float32).config
    others = [point for point in profile.points if not point.held_out]
    preset = cpu_core(cpu_kind(), bf16=False)
    assert fit_speed(others, config, preset, ranks_per_node=1) == profile.speed
    assert (
        f"fitted to {sum(point.part == 'micro_batch' for point in others)} micro-batches; {len(held_out)} others, held"
        in (command.judged(profile))
    )
    assert np.isfinite(list(asdict(profile.speed).values())).all()
    assert (profile.world_size, profile.ranks_per_node, profile.backend) == (1, 1, "none")
    assert 0 < profile.device_bytes == profile.host_bytes
    assert 0 < profile.host_bandwidth < math.inf


@pytest.mark.parametrize("in_order", [False, True])
def test_ranks_measure_together_and_agree(in_order, ranks4):
    profiles = ranks4.run(profiled, "llama", replace(QUICK, clock="cpu"), in_order)
    assert all(profile == profiles[0] for profile in profiles)
    parts = {(part, ranks) for part in ("micro_batch", "exchange") for ranks in (2, 4)}
    assert kinds(profiles[0]) >= parts | {("reduction", 4), ("optimizer", 4), ("micro_batch", 1)}
    assert profiles[0].device_bytes == profiles[0].host_bytes // 4
    assert profiles[0].backend == "gloo"


def test_attention_is_timed_with_the_heads_of_each_layer(monkeypatch):
    """Gemma 4's layers have heads of two widths, which no one field of its configuration says."""
    monkeypatch.setattr(profile_module, "patch_model", lambda model: model)
    sizes = TINY | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**sizes, layer_types=kinds, sliding_window=7, global_head_dim=32, pad_token_id=0)
    bench = profile_module._Bench(config, CPU, QUICK, None)
    assert {(shape.qk_width, shape.window): layers for shape, layers in bench.attention.items()} == {
        (16, 7): 1,
        (32, None): 1,
    }
    drawn: list[tuple[int, ...]] = []
    own = bench._heads
    monkeypatch.setattr(bench, "_heads", lambda *shape: drawn.append(shape) or own(*shape))
    bench.seconds(profile_module._Case("attention", (24,)), 1)
    assert {shape[2] for shape in drawn} == {16, 32}


def test_documents_that_must_stay_whole_or_end_are_measured_so():
    possible = cases(4, 1024)
    assert suited(possible, "split", None) == possible
    whole, alone, short = (
        suited(possible, "whole", None),
        suited(possible, "alone", None),
        suited(possible, "split", 100),
    )
    assert {case.ranks for case in whole if case.part == "micro_batch"} == {1}
    assert {case.part for case in whole if case.ranks > 1} == {"reduction", "optimizer"}
    assert {len(case.lengths) for case in alone} == {0, 1}
    assert max(length for case in short for length in case.lengths) <= 100
    assert any(len(case.lengths) > 1 for case in short)


def test_a_model_that_cannot_be_counted_is_refused_before_it_is_measured(monkeypatch):
    monkeypatch.setattr(profile_module, "_Bench", None)
    with pytest.raises(ValueError, match="'jetmoe' cannot be counted: its forward does not run on shapes alone"):
        profile_model(JetMoeConfig(hidden_size=64, num_hidden_layers=1, vocab_size=128), CPU, QUICK)


def test_leftover_ranks_wait_for_groups_of_two(most_ranks):
    # Of three ranks, pairs leave one over: it meets the others and measures nothing.
    assert [c.ranks for c in cases(3, 256) if c.part == "exchange"] == [2, 2, 3, 3]
    seconds = profile_module._of_all([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0], [None] * 3], 2, "wall")
    assert seconds == 2.0
    assert profile_module._of_all([[1.0], [3.0]], 2, "cpu") == 2.0


def test_a_profile_predicts_what_it_measured(monkeypatch):
    """On a machine that takes as long as a cost model says, but for one pass of three, in which it is disturbed."""
    config, timed = tiny_llama().config, Counter()
    true = replace(
        cpu_core(cpu_kind(), bf16=False),
        linear_flops=3e9,
        attention_flops=1e9,
        attention_half_tokens=20.0,
        document_seconds=2e-4,
        micro_batch_seconds=3e-4,
    )

    def seconds(bench: Any, case: Any, repeats: int) -> float:
        timed[case] += 1
        point = Point(case.part, case.lengths, case.ranks, 1.0)
        return float(predict([point], config, true, ranks_per_node=1)[0]) * (10.0 if timed[case] % 3 == 2 else 1.0)

    monkeypatch.setattr(profile_module._Bench, "seconds", seconds)
    profile = profile_model(config, CPU, ProfileSettings(longest=1024, seconds=40.0))
    micro_batches = [abs(e) for e, point in zip(profile.errors, profile.points) if point.part == "micro_batch"]
    assert len(micro_batches) >= 8
    assert max(micro_batches) < 1e-3
    assert any(point.held_out for point in profile.points)
    again = predict(profile.points, config, profile.speed, ranks_per_node=1)
    np.testing.assert_allclose(profile.predicted_seconds, again)


def test_what_takes_too_long_is_left_out_with_all_that_is_longer(monkeypatch):
    def seconds(bench: Any, case: Any, repeats: int) -> float:
        return max(1, sum(case.lengths)) / 1e3

    monkeypatch.setattr(profile_module._Bench, "seconds", seconds)
    profile = profile_model(tiny_llama().config, CPU, ProfileSettings(longest=2**20, seconds=40.0))
    whole = [
        point.lengths[0]
        for point in profile.points
        if point.part == "micro_batch" and len(point.lengths) == 1 and not point.held_out
    ]
    assert whole == [16, 32, 64, 128, 256, 512, 1024], "1 second is a fortieth; the first longer one ends it"
    assert max(sum(point.lengths) for point in profile.points) <= 2048


def test_where_memory_ends_lengths_end(monkeypatch):
    def seconds(bench: Any, case: Any, repeats: int) -> float:
        return math.inf if sum(case.lengths) > 512 else 1e-3

    monkeypatch.setattr(profile_module._Bench, "seconds", seconds)
    profile = profile_model(tiny_llama().config, CPU, ProfileSettings(longest=4096, seconds=40.0))
    whole = [point for point in profile.points if point.part == "micro_batch"]
    assert max(sum(point.lengths) for point in whole) == 512
    assert max(point.lengths[0] for point in profile.points if point.part == "attention") == 256, "half of it"
    assert all(math.isfinite(point.seconds) for point in profile.points)


@pytest.mark.parametrize(
    ("ranks", "node", "rank", "expected"),
    [
        (2, 2, 1, [(0, 0)]),
        (3, 8, 1, [(2, 0), (0, 2)]),
        (4, 2, 0, [(2, 2), (1, 1), (1, 1)]),
        (4, 2, 7, [(5, 5), (6, 6), (6, 6)]),
        (4, 1, 1, [(2, 0), (3, 3), (0, 2)]),
    ],
)
def test_pieces_cross_to_another_node_once_and_are_passed_on_inside(ranks, node, rank, expected):
    assert profile_module._peers(rank, ranks, node) == expected


@pytest.mark.parametrize(("ranks", "node"), [(2, 8), (4, 2), (6, 2), (8, 4), (8, 3)])
def test_whom_a_rank_sends_to_receives_from_it(ranks, node):
    peers = [profile_module._peers(rank, ranks, node) for rank in range(2 * ranks)]
    for rank, exchanges in enumerate(peers):
        assert len(exchanges) == ranks - 1
        for number, (to, _) in enumerate(exchanges):
            assert peers[to][number][1] == rank
            assert to // ranks == rank // ranks
            assert to != rank


@pytest.mark.parametrize("settings", [{"precision": "int8"}, {"longest": 1}, {"seconds": 0}, {"seconds": math.inf}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=r"precision='int8' is unknown; valid: float32|a profile needs documents of"):
        ProfileSettings(**settings)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_half_precision_and_checkpointing_are_measured(precision):
    profile = profiled("llama", replace(QUICK, precision=precision, gradient_checkpointing=True))
    assert profile.speed.activation_bytes == 2
    assert profile.precision == precision


# The command


app = Typer()
app.command()(command.profile)


ONE_THREAD = ("--threads", "1")
"""Threads of a machine whose cores others use wait for one another, and burn what they wait."""


def run_here(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, *ONE_THREAD, "--quick", "--longest", "128", "--cpu"])


@pytest.fixture
def at_once(monkeypatch):
    """Measure as briefly as possible; how well, beside what else runs on these cores, says nothing of the code."""
    monkeypatch.setattr(command, "QUICK_SECONDS", 0.5)
    monkeypatch.setattr(command, "refuse_meaningless", lambda *measured: None)


def test_the_command_writes_a_profile_that_the_trainer_takes(tmp_path, at_once):
    file = tmp_path / "p.json"
    result = run_here("--output", str(file))
    assert result.exit_code == 0, result.output
    for word in ("micro-batch", "attention_flops", "predicted", "median", f"written to {file}"):
        assert word in result.output
    assert Profile.load(file).clock == "wall"
    cost = cost_model(LongContextPlugin(capacity=100, profile=str(file)), tiny_llama(), Topology(2, 100), CPU)
    assert cost.linear_ps == CostModel.from_config(tiny_llama().config, Profile.load(file).speed).linear_ps


def test_a_yaml_file_says_which_model_and_how_it_is_trained(tmp_path, at_once):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2]}\n')
    config = tmp_path / "run.yaml"
    config.write_text(
        "model:\n  random_init: {model_type: llama, vocab_size: 64, hidden_size: 32, intermediate_size: 64, "
        "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}\n"
        f"data: {{path: {rows}}}\nlongctx: {{capacity: 64}}\ntraining: {{output_dir: out, bf16: true, use_cpu: true}}\n"
    )
    result = run_here("--model", str(config), "--output", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    profile = Profile.load(tmp_path / "p.json")
    assert (profile.precision, profile.model["hidden_size"], profile.model["layers"]) == ("autocast", 32, 1)
    config.write_text(config.read_text().replace("bf16: true, use_cpu: true", "fp16: true"))
    assert command._model(str(config))[1]["precision"] == "autocast", "float16 is about as fast as bfloat16"


def test_a_saved_model_is_read_without_its_weights(tmp_path, at_once):
    tiny_llama().config.save_pretrained(tmp_path)
    result = run_here("--model", str(tmp_path), "--output", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    assert Profile.load(tmp_path / "p.json").model["hidden_size"] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int8"], "precision='int8' is unknown"),
        (["--clock", "sun"], "clock='sun' is unknown; valid: wall, cpu"),
        (["--model", "no/such/model/here"], "no/such/model/here"),
        (["--ranks", "0"], "--ranks"),
    ],
)
def test_wrong_options_are_named(arguments, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run_here(*arguments)
    assert result.exit_code == 2
    assert message in result.output


PROGRAM = """
import os
import typer
import hf_longctx.training.measuring.rank_profile as measuring
from hf_longctx.commands import profile
from hf_longctx.training.measuring.step_costs import cost_model

profile.QUICK_SECONDS = 0.5
profile.refuse_meaningless = lambda *measured: None  # how well this machine is measured while others use it

def failing(world_size, longest, device, cases=measuring.cases):
    if os.environ.get("RANK", "0") == os.environ.get("FAILING_RANK"):
        raise OSError("rank 1 has no more")
    return cases(world_size, longest, device)

measuring.cases = failing
if __name__ == "__main__":
    typer.run(profile.profile)
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def start_two(program: Path, fresh: bool, **environment: str) -> Ended:
    """Without a launcher."""
    output = ("--output", program.parent / "profile.json")
    return run(program, "--ranks", "2", "--quick", "--longest", "128", "--cpu", *output, fresh=fresh, **environment)


@pytest.mark.processes
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["forked", "fresh"])
def test_ranks_are_started_here(fresh, program):
    ended = start_two(program, fresh)
    assert ended.code == 0, ended.output
    profile = Profile.load(program.parent / "profile.json")
    assert (profile.world_size, profile.ranks_per_node) == (2, 2)
    assert ("exchange", 2) in kinds(profile)


@pytest.mark.processes
@pytest.mark.nightly
def test_a_rank_that_fails_ends_the_others(program):
    ended = start_two(program, fresh=True, FAILING_RANK="1")
    assert ended.code != 0
    assert "rank 1 has no more" in ended.output
    assert not (program.parent / "profile.json").exists()


@pytest.mark.processes
@pytest.mark.parametrize("launch", [torchrun, pytest.param(accelerate_launch, marks=pytest.mark.nightly)])
def test_a_launcher_starts_the_ranks(launch, tmp_path, program):
    arguments = ["--quick", "--longest", "128", "--output", tmp_path / "p.json"]
    ended = launch(program, *arguments)
    assert ended.code == 0, ended.output
    content = json.loads((tmp_path / "p.json").read_text())
    assert content["world_size"] == 2
    assert content["threads"] == 1
    assert ended.output.count("written to") == 1


def test_points_are_named_by_their_documents(capsys):
    points = (
        Point("micro_batch", (512, 512, 1024), 2, 0.5),
        Point("reduction", (), 2, 2.0),
    )
    command.show(replace(profiled("llama", QUICK), points=points, predicted_seconds=(0.55, 2.0)))
    shown = capsys.readouterr().out
    assert "2 x 512, 1024" in shown
    assert "+10.0%" in shown
    assert "2.000 s" in shown


@pytest.mark.parametrize(
    ("lengths", "factor", "reason"),
    [
        ((16,), 1.05, r"are fitted to 1 micro-batches; 2 others.* leave --quick out, or measure a smaller model"),
        ((16, 32, 64), 1.72, r"predicted within 72.0% \(median\)"),
        ((16, 32, 64), 1.05, None),
    ],
)
def test_speeds_that_say_nothing_of_a_machine_are_not_written(lengths, factor, reason, tmp_path, monkeypatch):
    """One case may take so long that hardly any other is measured."""
    fitted = [Point("micro_batch", (length,), 1, 0.5) for length in lengths]
    held_out = [Point("micro_batch", (length,), 1, 0.5, held_out=True) for length in (48, 96)]
    seconds = [0.5] * len(fitted) + [0.5 * factor] * len(held_out)
    made = replace(profiled("llama", QUICK), points=(*fitted, *held_out), predicted_seconds=tuple(seconds))
    monkeypatch.setattr(command, "_measured", lambda *_: made)
    result = run_here("--output", str(tmp_path / "p.json"))
    assert (result.exit_code == 0) == (reason is None) == (tmp_path / "p.json").exists()
    assert "micro-batch, held out" in result.output
    if reason is not None:
        assert re.search(reason, str(result.exception))


# benchmarks/prediction.py


def test_errors_of_steps_are_of_the_slowest_rank_on_the_clock_and_of_each_rank_in_cpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from prediction import Run, Step, summarise

    first = Step(1.0, 50.0, 4, 1)  # warms up, and does not count
    runs = [
        Run([first, Step(1.0, 0.9, 4, 2), Step(2.0, 1.6, 4, 1)], [0.1, -0.3, 0.2]),
        Run([first, Step(1.0, 1.0, 4, 2), Step(2.0, 2.5, 4, 1)], [0.1, -0.3, 0.2]),
    ]
    wall = summarise(runs, "wall")
    assert wall["median error"] == pytest.approx((0 + 0.2) / 2)
    assert wall["all predicted over all measured"] == pytest.approx(3 / 3.5)
    assert wall["share of documents split"] == pytest.approx(4 / 12)
    assert wall["median error of the profile's micro-batches"] == 0.2
    cpu = summarise(runs, "cpu")
    assert cpu["median error"] == pytest.approx(np.median([1 / 9, 0, 0.25, 0.2]))
    assert cpu["best factor"] == pytest.approx(1 / np.median([1 / 0.9, 1, 2 / 1.6, 2 / 2.5]))
