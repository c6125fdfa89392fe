"""Speeds are found again from the times that they predict, whatever else disturbs those times; profiles survive a file."""

from dataclasses import asdict, replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import AutoConfig

from hf_longctx.hardware.profile import CalibrationError, Point, Profile
from hf_longctx.planner import CPU_CORE, GPU, CostModel
from hf_longctx.planner.cost.calibration import fit_speed, nonnegative_least_squares, predict
from hf_longctx.training.measuring.rank_profile import cases
from tests.builders.known_speeds import CONFIG, NODE, TRUTH, profile, shapes, timed, true_seconds
from tests.builders.tiny_models import tiny_bloom, tiny_llama, tiny_mistral, tiny_mixtral

PRESET = replace(CPU_CORE, activation_bytes=4)


@pytest.mark.parametrize("preset", [PRESET, replace(GPU, activation_bytes=4)], ids=["cpu", "gpu"])
def test_speeds_are_found_from_the_times_that_they_predict(preset):
    points = shapes(8)
    speed = fit_speed(timed(points, true_seconds(points)), CONFIG, preset, ranks_per_node=NODE)
    for name, value in asdict(TRUTH).items():
        assert getattr(speed, name) == pytest.approx(value, rel=2e-3), name


def test_what_no_point_shows_stays_as_the_preset_has_it():
    points = shapes(1)[:-2]
    speed = fit_speed(timed(points, true_seconds(points)), CONFIG, PRESET)
    for name in ("inside_bytes", "between_bytes", "message_seconds", "reduce_bytes", "optimizer_parameters"):
        assert getattr(speed, name) == getattr(PRESET, name)
    for name in ("attention_flops", "linear_flops", "attention_half_tokens", "micro_batch_seconds"):
        assert getattr(speed, name) == pytest.approx(getattr(TRUTH, name), rel=2e-3), name


@given(
    noise=arrays(float, 51, elements=st.floats(-0.02, 0.02)),
    disturbed=st.sets(st.integers(0, 48), max_size=6),
    factor=st.floats(1.5, 50),
)
def test_disturbed_times_move_predictions_little(noise, disturbed, factor):
    points = shapes(8)
    true = true_seconds(points)
    assert len(points) == len(noise)
    seconds = true * (1 + noise)
    seconds[list(disturbed)] *= factor
    speed = fit_speed(timed(points, seconds), CONFIG, PRESET, ranks_per_node=NODE)
    errors = np.abs(true_seconds(points, speed) / true - 1)
    assert np.median(errors) < 0.04
    assert np.quantile(errors, 0.8) < 0.15


def test_fitting_is_deterministic():
    points = shapes(8)
    measured = timed(points, true_seconds(points) * (1 + 0.05 * np.sin(np.arange(len(points)))))
    assert fit_speed(measured, CONFIG, PRESET) == fit_speed(measured, CONFIG, PRESET)


def test_no_speed_is_infinite_where_a_term_is_too_short_to_be_seen():
    points = shapes(2)
    seconds = true_seconds(points, replace(TRUTH, inside_bytes=1e18, attention_flops=1e18, message_seconds=0.0))
    speed = fit_speed(timed(points, np.maximum(seconds, 1e-9)), CONFIG, PRESET)
    assert np.isfinite(list(asdict(speed).values())).all()
    assert CostModel.from_config(CONFIG, speed).inside_ps >= 1


def test_attention_that_is_too_short_to_be_seen_is_as_much_faster_as_products_are():
    """Long documents would cost nothing otherwise."""
    truth = replace(TRUTH, attention_flops=1e18, attention_half_tokens=0.0, linear_flops=2 * PRESET.linear_flops)
    points = [point for point in shapes(1)[:-2] if sum(point.lengths) <= 64]
    speed = fit_speed(timed(points, true_seconds(points, truth)), CONFIG, PRESET)
    assert speed.attention_flops == pytest.approx(2 * PRESET.attention_flops, rel=0.1)
    points = shapes(1)[:-2]
    seconds = true_seconds(points, truth)
    speed = fit_speed(timed(points, seconds), CONFIG, PRESET)
    assert (true_seconds(points, speed) < 2.01 * seconds).all(), "a measured time is no shorter than its attention"


@pytest.mark.parametrize("beside_host", [False, True])
def test_models_without_attention_leave_its_speed_as_the_preset_has_it(beside_host: bool):
    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    points = shapes(1)[:-2]
    speed = fit_speed(timed(points, true_seconds(points)), config, PRESET, beside_host=beside_host)
    assert speed.attention_flops == PRESET.attention_flops


@pytest.mark.parametrize("launch", [0.0, 2e-3, 8e-3])
def test_what_a_host_takes_to_start_kernels_is_told_from_what_a_gpu_computes(launch):
    """On an H200 a sum of terms gave products no time, and steps took 1.36 times as long as predicted: of lengths up to 4,096
    tokens all micro-batches took what the host took. With 3 % noise, full micro-batches within 5 %."""
    config = AutoConfig.for_model(
        "llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=12, vocab_size=32768
    )
    truth = replace(GPU, linear_flops=5.5e14, attention_flops=2.9e14, document_seconds=5e-6, launch_seconds=launch)
    measured = [Point(case.part, case.lengths, 1, 1.0) for case in cases(1, 32768, "cuda") if not case.held_out]
    times = predict(measured, config, truth) * np.exp(0.03 * np.sin(2.4 * np.arange(len(measured))))
    speed = fit_speed(timed(measured, times), config, GPU, beside_host=True)
    packs = [Point("micro_batch", lengths, 1, 1.0) for lengths in ((20000, 12768), (8192,) * 4, (512,) * 64, (32768,))]
    np.testing.assert_allclose(predict(packs, config, speed), predict(packs, config, truth), rtol=0.05)
    assert speed.linear_flops == pytest.approx(truth.linear_flops, rel=0.1)
    if launch:
        assert speed.launch_seconds == pytest.approx(launch, rel=0.05)


@pytest.mark.parametrize("capacity", [None, 1024, 65536])
def test_a_full_micro_batch_costs_what_of_the_host_it_does_not_hide(capacity):
    speed = replace(GPU, micro_batch_seconds=0.0, launch_seconds=5e-3)
    cost = CostModel.from_config(CONFIG, speed, capacity=capacity)
    launch_ns, computed_ns = 5e6 * CONFIG.num_hidden_layers, (capacity or 0) * cost.linear_ps / 1000
    expected = max(0, launch_ns - computed_ns) if capacity else 0
    assert cost.micro_batch_ns == pytest.approx(expected, abs=1)
    assert replace(cost, micro_batch_ns=0) == CostModel.from_config(CONFIG, replace(speed, launch_seconds=0.0))


FAMILIES = {"llama": tiny_llama, "mistral": tiny_mistral, "mixtral": tiny_mixtral, "bloom": tiny_bloom}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_micro_batches_are_predicted_as_the_planner_predicts_them(family, ranks):
    """predict() is a sum of floats, CostModel one of rounded integers: 1 ns per token and term."""
    config = FAMILIES[family]().config
    cost = CostModel.from_config(config, TRUTH, ranks_per_node=NODE)
    for lengths in ((4096,), (60, 700, 5), (2,)):
        [seconds] = predict([Point("micro_batch", lengths, ranks, 1.0)], config, TRUTH, ranks_per_node=NODE)
        expected = cost.micro_batch_ns + cost.time(np.array(lengths), ranks).sum()
        assert seconds * 1e9 == pytest.approx(int(expected), abs=4 * sum(lengths) + 100)


def test_a_step_is_predicted_as_the_trainer_predicts_it():
    parts = [Point("reduction", (), 4, 1.0), Point("optimizer", (), 4, 1.0)]
    cost = CostModel.from_config(CONFIG, TRUTH, world_size=4)
    assert predict(parts, CONFIG, TRUTH).sum() * 1e9 == pytest.approx(cost.step_ns, rel=1e-6)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds):
    points = [Point("micro_batch", (64,), 1, 0.1), Point("micro_batch", (128,), 1, seconds)]
    with pytest.raises(CalibrationError, match=r"lengths=\(128,\).*must be positive and finite"):
        fit_speed(points, CONFIG, PRESET)


def test_without_a_micro_batch_there_is_nothing_to_fit():
    with pytest.raises(CalibrationError, match="1 points, and none is a micro-batch"):
        fit_speed([Point("exchange", (64,), 2, 0.1)], CONFIG, PRESET)


def by_enumeration(matrix: np.ndarray, right: np.ndarray) -> float:
    """The least |matrix @ x - right| over x >= 0: of all sets of unknowns that may be positive, the best."""
    best = float(np.linalg.norm(right))
    for size in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), size):
            x = np.linalg.lstsq(matrix[:, chosen], right, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(matrix[:, chosen] @ x - right)))
    return best


@given(
    matrix=arrays(float, (7, 4), elements=st.integers(-5, 5).map(float)),
    right=arrays(float, 7, elements=st.integers(-5, 5).map(float)),
    scale=arrays(float, 4, elements=st.sampled_from([1e-12, 1e-3, 1.0, 1e9])),
)
def test_nonnegative_least_squares_find_the_best_of_all_sets(matrix, right, scale):
    x = nonnegative_least_squares(matrix * scale, right)
    assert (x >= 0).all()
    assert np.linalg.norm(matrix * scale @ x - right) <= by_enumeration(matrix, right) + 1e-9


def test_a_profile_survives_a_file(tmp_path):
    file = tmp_path / "profile.json"
    profile().save(file)
    loaded = Profile.load(file)
    assert replace(loaded, predicted_seconds=()) == replace(profile(), predicted_seconds=())
    np.testing.assert_allclose(loaded.errors, 0.25, rtol=1e-4)
    assert len(file.read_text().splitlines()) < 40 + len(loaded.points), "one point a line"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no profile"),
        ("[]", "is no profile"),
        ('{"points": [], "speed": {"attention_flops": 1}}', r"is no profile \(TypeError"),
        ('{"points": 7}', r"is no profile \(KeyError"),
    ],
)
def test_what_is_no_profile_is_named(tmp_path, text, message):
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CalibrationError, match=message) as error:
        Profile.load(file)
    assert "other.json" in str(error.value)
