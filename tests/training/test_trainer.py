"""Training on 1, 2 and 4 ranks is what a loop over documents in one process is: losses, gradient norms, weights.

float32: relative error of losses and gradient norms, and absolute error of weights (of size 1), at most 1e-5 after all
steps.
"""

import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from hf_longctx import LongContextMixin, LongContextPlugin, LongContextTrainer, patch_model
from hf_longctx.planner import GlobalBatches
from tests.builders.training_runs import (
    MODELS,
    MixedTrainer,
    Run,
    arguments,
    assembled,
    documents,
    fresh_accelerator_state,
    reference,
    step_loss,
    train,
)
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 200, 2, 14, 30]
EVAL_LENGTHS = [4, 2, 180, 33, 70, 9, 12]
MOST = 200
"""Tokens that all ranks hold together: the longest document, so that it is split over all of them."""
TOKENS = 210
"""Tokens of a global batch."""
EPOCHS = 3
SETTINGS: dict[str, Any] = {
    "num_train_epochs": EPOCHS,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 0.5,
}
WORLDS = [1, 2, 4]


def rows(labels: bool = True) -> Any:
    made = documents(LENGTHS, labels)
    for row in made:
        if labels and set(row["labels"][1:]) == {-100}:
            row["labels"][1] = 7
    return made


def runs_of(request: pytest.FixtureRequest, world_size: int, *args: Any, **kwargs: Any) -> list[Run]:
    """Return what each rank saw."""
    if world_size == 1:
        return [train(*args, **kwargs)]
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    return pool.run(train, *args, **kwargs)


def batches(lengths: list[int], **size: int) -> GlobalBatches:
    return GlobalBatches(np.array(lengths), 3, **size)


def assert_same_training(run: Run, losses: list[float], norms: list[float], weights: dict[str, torch.Tensor]) -> None:
    np.testing.assert_allclose(run.series("loss"), losses, rtol=1e-5)
    np.testing.assert_allclose(run.series("grad_norm"), norms, rtol=1e-5)
    torch.testing.assert_close(run.weights, weights, rtol=0, atol=1e-5)


@dataclass
class Expected:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    eval_loss: float


BY_NIGHT = ("mistral", "mpt")
"""Models whose exactness on any ranks tests/models/test_exactness.py holds, and which train as bloom and llama do."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in BY_NIGHT)) for name in sorted(MODELS)],
)
def expected(request, tmp_path_factory) -> tuple[str, Expected]:
    """The model's name and its reference."""
    settings = SETTINGS | {"output_dir": tmp_path_factory.mktemp("reference")}
    losses, norms, weights = reference(request.param, rows(), batches(LENGTHS, tokens=TOKENS), EPOCHS, settings)
    plain = MODELS[request.param]()
    plain.load_state_dict(weights)
    with torch.no_grad():
        eval_loss = float(step_loss(plain.eval(), documents(EVAL_LENGTHS, seed=1), router=False))
    return request.param, Expected(losses, norms, weights, eval_loss)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "in_order"),
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.nightly),
        pytest.param(2, True, marks=pytest.mark.nightly),
        pytest.param(4, False, marks=pytest.mark.nightly),
        (4, True),
    ],
)
def test_training_is_a_loop_over_documents(expected, world_size, in_order, tmp_path, request):
    model, reference = expected
    runs = runs_of(
        request,
        world_size,
        model,
        rows(),
        {
            "capacity": MOST // world_size,
            "global_batch_tokens": TOKENS,
            "ulysses_degree": 2 if world_size == 4 else 1,
            "keep_last_slice": in_order,
        },
        SETTINGS | {"output_dir": tmp_path},
        eval_rows=documents(EVAL_LENGTHS, seed=1),
        in_order=in_order,
    )
    for run in runs:
        assert_same_training(run, reference.losses, reference.norms, reference.weights)
        assert run.evaluation["eval_loss"] == pytest.approx(reference.eval_loss, rel=1e-5)
        torch.testing.assert_close(run.weights, runs[0].weights, rtol=0, atol=0)
    assert_each_epoch_is_every_document_once(runs)
    if world_size == 4:
        assert any(not segments for run in runs for segments in run.held), "a rank had nothing to do in some step"
    if world_size > 1:
        assert sum(runs[0].series("split_documents")) > 0
        assert sum(runs[0].series("exchanged_mib")) > 0


def assert_each_epoch_is_every_document_once(runs: list[Run]) -> None:
    steps = [assembled(segments) for segments in zip(*(run.held for run in runs), strict=True)]
    epochs = [len(batches(LENGTHS, tokens=TOKENS).epoch(epoch)) for epoch in range(EPOCHS)]
    assert len(set(epochs)) > 1, "the epochs of this test must differ in their number of steps"
    assert len(steps) == sum(epochs)
    for epoch, count in enumerate(epochs):
        first = sum(epochs[:epoch])
        seen = sorted(document for step in steps[first : first + count] for document in step)
        assert seen == sorted(row["input_ids"] for row in rows())


@pytest.mark.processes
@pytest.mark.parametrize("world_size", WORLDS)
def test_batch_size_times_ranks_times_accumulation_is_the_global_batch(world_size, tmp_path, request):
    settings = SETTINGS | {
        "output_dir": tmp_path,
        "per_device_train_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
    }
    runs = runs_of(request, world_size, "llama", rows(labels=False), {"capacity": MOST // world_size}, settings)
    losses, norms, weights = reference("llama", rows(labels=False), batches(LENGTHS, documents=8), 1, settings)
    for run in runs:
        assert_same_training(run, losses, norms, weights)
        assert run.series("documents") == [8, 8, 4]
    messages = [message for run in runs for message in run.messages if "accumulation" in message]
    assert len(messages) == 1, "the main process says it, once"
    assert f"{4 // world_size} documents * {world_size} ranks * 2 = 8 documents per optimizer step" in messages[0]


@pytest.mark.parametrize(
    ("length", "steps", "epochs"),
    [({"max_steps": 7}, 7, 3), ({"max_steps": 2}, 2, 1), ({"num_train_epochs": 1.5}, 3 + 2, 2)],
)
def test_the_length_of_a_run_and_its_schedule(length, steps, epochs, tmp_path):
    settings = {"output_dir": tmp_path, "learning_rate": 0.01, "lr_scheduler_type": "linear"} | length
    run = train("llama", rows(), {"capacity": MOST, "global_batch_documents": 7}, settings)
    assert len(run.held) == len(run.series("loss")) == steps
    # Trainer logs the rate after the step's update of the schedule, or the one it was made with, by version.
    used = [0.01 * (1 - step / steps) for step in range(steps + 1)]
    assert run.series("learning_rate") in (pytest.approx(used[:-1]), pytest.approx(used[1:]))
    assert math.ceil(run.log[-1]["epoch"]) == epochs


@pytest.mark.processes
def test_another_trainer_class_takes_the_mixin(tmp_path, request):
    settings = SETTINGS | {"output_dir": tmp_path, "num_train_epochs": 1}
    losses, norms, weights = reference("llama", rows(), batches(LENGTHS, documents=5), 1, settings)
    plugin = {"capacity": MOST // 2, "global_batch_documents": 5}
    for run in runs_of(request, 2, "llama", rows(), plugin, settings, trainer_class=MixedTrainer):
        assert_same_training(run, losses, norms, weights)
        assert run.series("other_trainer")[0] == 1.0


@pytest.mark.processes
def test_callbacks_see_what_the_plan_did(tmp_path, request):
    plugin = {"capacity": MOST // 2, "global_batch_documents": 5}
    settings = SETTINGS | {"output_dir": tmp_path, "num_train_epochs": 1}
    seen = [run.seen_by_callback for run in runs_of(request, 2, "llama", rows(), plugin, settings)]
    numbers = ("documents", "split_documents", "tokens", "plan_balance", "plan_idle", "exchanged_mib", "skipped_steps")
    for first, second in zip(*seen, strict=True):
        assert {name: first[name] for name in (*numbers, "loss")} == {name: second[name] for name in (*numbers, "loss")}
        assert first["documents"] == 5
        assert first["plan_balance"] >= 1
        assert 0 <= first["plan_idle"] < 1
        assert first["skipped_steps"] == 0
        assert (first["exchanged_mib"] > 0) == (first["split_documents"] > 0)
    assert sum(step["tokens"] for step in seen[0]) == sum(LENGTHS)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", WORLDS)
def test_evaluation_weighs_tokens_over_several_steps_and_named_data_sets(world_size, tmp_path, request):
    one, two = documents([180, 150, 2, 9, 120, 160, 33] * 3, labels=True, seed=5), documents(EVAL_LENGTHS, seed=1)
    evaluations = runs_of_evaluation(request, world_size, tmp_path, one, two)
    plain = MODELS["mixtral"]().eval()
    with torch.no_grad():
        expected = [float(step_loss(plain, documents_, router=False)) for documents_ in (one, two)]
    for metrics in evaluations:
        assert [metrics["eval_one_loss"], metrics["eval_two_loss"]] == pytest.approx(expected, rel=1e-5)
        assert [metrics["one_loss"], metrics["two_loss"]] == pytest.approx(expected, rel=1e-5)


def runs_of_evaluation(request: pytest.FixtureRequest, world_size: int, *args: Any) -> list[dict[str, float]]:
    if world_size == 1:
        return [evaluated(*args)]
    return request.getfixturevalue(f"ranks{world_size}").run(evaluated, *args)


def evaluated(output_dir: Any, one: Any, two: Any) -> dict[str, float]:
    """Evaluation of a new model: data sets by name, and given to evaluate()."""
    fresh_accelerator_state()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = LongContextTrainer(
        MODELS["mixtral"](),
        arguments(output_dir),
        eval_dataset={"one": one, "two": two},
        plugin=LongContextPlugin(capacity=MOST // world_size),
    )
    metrics = trainer.evaluate()
    for name, dataset in (("one", one), ("two", two)):
        metrics |= trainer.evaluate(dataset, metric_key_prefix=name)
    with pytest.raises(ValueError, match=r"no data set of this trainer is named 'three'\. Valid: 'one', 'two'"):
        trainer.evaluate("three")
    return metrics


@pytest.mark.processes
def test_evaluation_inside_training_leaves_training_as_it_is(tmp_path, request):
    plugin = {"capacity": MOST // 2, "global_batch_documents": 5}
    settings = SETTINGS | {"output_dir": tmp_path, "num_train_epochs": 1}
    evaluating = settings | {"eval_strategy": "steps", "eval_steps": 1}
    [without, _] = runs_of(request, 2, "mixtral", rows(), plugin, settings)
    [first, second] = runs_of(
        request, 2, "mixtral", rows(), plugin, evaluating, eval_rows=documents(EVAL_LENGTHS, seed=1)
    )
    assert first.series("loss") == without.series("loss")
    torch.testing.assert_close(first.weights, without.weights, rtol=0, atol=0)
    assert first.series("eval_loss") == second.series("eval_loss")
    assert len(set(first.series("eval_loss"))) == len(first.series("loss"))


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_checkpoint_is_loaded_at_the_end(world_size, tmp_path, request):
    settings = {
        "output_dir": tmp_path,
        "learning_rate": 1.0,  # gets worse
        "num_train_epochs": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    plugin = {"capacity": MOST // world_size, "global_batch_documents": 7}
    eval_rows = documents(EVAL_LENGTHS, seed=1)
    for run in runs_of(request, world_size, "llama", rows(), plugin, settings, eval_rows=eval_rows):
        during, best = run.series("eval_loss"), min(run.series("eval_loss"))
        assert during[-1] > best
        assert run.evaluation["eval_loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.processes
def test_a_frozen_parameter_stays_and_the_others_train_alike(tmp_path, request):
    trained = []
    for world_size in (1, 2):
        settings = SETTINGS | {"output_dir": tmp_path / str(world_size), "num_train_epochs": 1}
        plugin = {"capacity": MOST // world_size, "global_batch_documents": 7}
        trained.append(runs_of(request, world_size, partly_frozen(), rows(), plugin, settings)[0])
    torch.testing.assert_close(trained[1].weights, trained[0].weights, rtol=0, atol=1e-5)
    start = partly_frozen().state_dict()
    changed = {name for name in start if not torch.equal(start[name], trained[0].weights[name])}
    assert changed == {name for name in start if ".layers.1." in name}


def partly_frozen() -> Any:
    model = MODELS["llama"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.1." in name)
    return model


class NumberOfTokens(TrainerCallback):
    """Fails where Trainer's count of tokens is not that of the documents."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.num_input_tokens_seen == sum(LENGTHS)
        assert state.total_flos > 0


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_seen_are_those_of_all_ranks(world_size, tmp_path, request):
    settings = {"output_dir": tmp_path, "num_train_epochs": 1, "include_num_input_tokens_seen": "all"}
    plugin = {"capacity": MOST // world_size, "global_batch_documents": 9}
    runs_of(request, world_size, "llama", rows(), plugin, settings, callbacks=[NumberOfTokens()])


def test_a_patched_model_and_a_second_training_are_taken_as_they_are(tmp_path):
    fresh_accelerator_state()
    trainer = LongContextTrainer(
        patch_model(MODELS["llama"]()),
        arguments(tmp_path, max_steps=2),
        train_dataset=rows(),
        plugin=LongContextPlugin(capacity=MOST, global_batch_documents=7),
    )
    first = trainer.train().training_loss
    assert trainer.train().training_loss < first
    assert trainer.state.global_step == 2


def test_workers_start_as_asked_and_the_device_s_cache_is_emptied_as_often(tmp_path, monkeypatch):
    fresh_accelerator_state()
    emptied: list[int] = []
    monkeypatch.setattr(sys.modules[LongContextMixin.__module__], "clear_device_cache", lambda: emptied.append(1))
    args = arguments(tmp_path, max_steps=4, torch_empty_cache_steps=2)
    trainer = LongContextTrainer(MODELS["llama"](), args, train_dataset=rows(), plugin=LongContextPlugin(capacity=MOST))
    trainer.train()
    assert len(emptied) == 2
    trainer.args.dataloader_num_workers, trainer.args.dataloader_multiprocessing_context = 1, "forkserver"
    assert trainer.get_train_dataloader().multiprocessing_context.get_start_method() == "forkserver"


def test_losses_are_logged_in_float32_whatever_torch_makes_by_default(tmp_path):
    plugin, settings = {"capacity": MOST, "global_batch_documents": 7}, {"output_dir": tmp_path, "max_steps": 2}
    expected, model = train("llama", rows(), plugin, settings).series("loss"), MODELS["llama"]()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert train(model, rows(), plugin, settings).series("loss") == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_search_varies_the_global_batch_or_is_refused(tmp_path):
    """gradient_accumulation_steps too, which the trial before it has folded in."""

    def search(**plugin: Any) -> LongContextTrainer:
        trainer = LongContextTrainer(
            model=MODELS["llama"](),
            args=arguments(tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=1),
            train_dataset=rows(),
            plugin=LongContextPlugin(capacity=MOST, **plugin),
        )
        trainer.hp_search_backend = HPSearchBackend.WANDB  # whose trials are mappings
        return trainer

    free = search()
    for trial, documents_per_step in (
        ({"per_device_train_batch_size": 2}, 8),
        ({"gradient_accumulation_steps": 3}, 6),
        ({"gradient_accumulation_steps": 1, "learning_rate": 0.5}, 2),
    ):
        free._hp_search_setup(trial)
        assert (free.default_documents, free.args.gradient_accumulation_steps) == (documents_per_step, 1)
    chosen = search(global_batch_documents=4)
    chosen._hp_search_setup({"learning_rate": 0.5})
    with pytest.raises(
        ValueError, match=r"varies per_device_train_batch_size, which .*: global_batch_documents=4 sets"
    ):
        chosen._hp_search_setup({"per_device_train_batch_size": 2})


def test_the_table_of_hooks_names_all_of_them_in_order():
    """The table at the top of training/trainer.py says why each of Trainer's methods is overridden."""
    table = (sys.modules[LongContextMixin.__module__].__doc__ or "").partition("Trainer's methods that are overridden")[
        2
    ]
    rows = re.findall(r"^    (\w+)(?: +[\d.]+)?  +\w", table, re.MULTILINE)
    known = vars(Trainer).keys() | set(rows)  # older releases have not all of them
    assert rows == [name for name, hook in vars(LongContextMixin).items() if callable(hook) and name in known]
