"""A run that was interrupted goes on as if it had not been: the same documents, losses and weights, on any number of
ranks.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.trainer_callback import TrainerCallback, TrainerState

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.checkpoint.export import changed_configuration
from hf_longctx.checkpoint.folder import CheckpointError
from hf_longctx.checkpoint.state import load_schedule
from hf_longctx.training.run_state import RunState
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import (
    POISONED_STEPS,
    PoisonedTrainer,
    RecordingTrainer,
    Run,
    arguments,
    assembled,
    documents,
    fresh_accelerator_state,
    train,
)
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 200, 2, 14, 30]
MOST = 200
PLUGIN = {"global_batch_tokens": 210}
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 3,
    "warmup_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
}
SEVENTH = 7
"""A step in the middle of the second epoch: the epochs of these documents have 5, 6 and 5 steps."""


def rows() -> Any:
    return documents(LENGTHS)


def run_on(world_size: int, pool: RankPool | None, output_dir: Path, **kwargs: Any) -> list[Run]:
    arguments = ("llama", kwargs.pop("rows", rows()), PLUGIN | {"capacity": MOST // world_size})
    settings = SETTINGS | {"output_dir": output_dir} | kwargs.pop("settings", {})
    if pool is None:
        return [train(*arguments, settings, **kwargs)]
    return pool.run(train, *arguments, settings, **kwargs)


@pytest.fixture(scope="module")
def uninterrupted(ranks2, tmp_path_factory) -> tuple[Path, list[Run]]:
    """The folder of its checkpoints, one per step, and what both ranks saw."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, run_on(2, ranks2, folder)


def assert_continues(runs: list[Run], uninterrupted: list[Run], after: int, tolerance: float) -> None:
    whole = uninterrupted[0]
    documents_of_step = [assembled(segments) for segments in zip(*(run.held for run in uninterrupted), strict=True)]
    assert [assembled(segments) for segments in zip(*(run.held for run in runs), strict=True)] == documents_of_step[
        after:
    ]
    for run in runs:
        # The log of a resumed run begins with what the checkpoint had logged.
        np.testing.assert_allclose(run.series("loss"), whole.series("loss"), rtol=tolerance)
        np.testing.assert_allclose(run.series("learning_rate"), whole.series("learning_rate"), rtol=1e-12)
        torch.testing.assert_close(run.weights, whole.weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("after", [5, SEVENTH, 15])
def test_a_resumed_run_continues_the_sequence_of_losses(after, uninterrupted, ranks2, tmp_path):
    folder, runs = uninterrupted
    assert len(runs[0].series("loss")) == 16
    resumed = run_on(2, ranks2, tmp_path, resume=str(folder / f"checkpoint-{after}"))
    assert_continues(resumed, runs, after, tolerance=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_run_is_resumed_on_another_number_of_ranks(world_size, uninterrupted, request, tmp_path):
    folder, runs = uninterrupted
    pool = None if world_size == 1 else request.getfixturevalue(f"ranks{world_size}")
    resumed = run_on(world_size, pool, tmp_path, resume=str(folder / f"checkpoint-{SEVENTH}"))
    assert_continues(resumed, runs, SEVENTH, tolerance=1e-5)


def test_the_global_batch_of_the_first_launch_stays_where_it_followed_from_the_number_of_ranks(ranks2, tmp_path):
    plugin, settings = {"capacity": MOST}, SETTINGS | {"num_train_epochs": 1, "per_device_train_batch_size": 3}
    runs = ranks2.run(train, "llama", rows(), plugin, settings | {"output_dir": tmp_path / "two"})
    assert runs[0].series("documents") == [6, 6, 6, 2]
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    resumed = train("llama", rows(), plugin, settings | {"output_dir": tmp_path / "one"}, resume=checkpoint)
    assert_continues([resumed], runs, 2, tolerance=1e-5)
    [message] = [message for message in resumed.messages if "the global batch stays" in message]
    assert "stays 6 documents" in message
    assert "would make 3 now" in message


class Counting(torch.optim.SGD):
    """Counts its steps in a tensor that its groups have from the first step on, as optimi's do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            count = group.setdefault("count", torch.tensor(0, dtype=torch.int32))
            count.add_(1)
            for weight in group["params"]:
                weight.data.sub_(weight.grad, alpha=group["lr"] / count.item())


class CountingTrainer(RecordingTrainer):
    """Trains with it, at a rate that is a tensor too, as those of a captured step are."""

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        return Counting, {"lr": torch.tensor(0.1)}


class SeesRates(TrainerCallback):
    """Looks whether the rate is the tensor that it was a step before."""

    def __init__(self) -> None:
        self.rates: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_an_optimizer_whose_groups_hold_tensors_goes_on_with_tensors(tmp_path):
    kwargs: dict[str, Any] = {"settings": {"max_steps": 4}, "trainer_class": CountingTrainer}
    [whole] = run_on(1, None, tmp_path / "a", **kwargs)
    seen = SeesRates()
    checkpoint = str(tmp_path / "a" / "checkpoint-2")
    [resumed] = run_on(1, None, tmp_path / "b", **kwargs, resume=checkpoint, callbacks=[seen])
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=0)
    assert len(seen.rates) == 2
    assert all(isinstance(rate, torch.Tensor) and rate is seen.rates[0] for rate in seen.rates)


class Wrapping(torch.optim.SGD):
    """Wraps tensors of its state in a dictionary where it gives them away, as optimizers of bitsandbytes 0.50 do."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        wrapped = {number: {"__wrapped__": dict(of_weight)} for number, of_weight in state["state"].items()}
        return state | {"state": wrapped}


class WrappingTrainer(RecordingTrainer):
    """Trains with it."""

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        return Wrapping, {"lr": 0.1, "momentum": 0.9}


def test_an_optimizer_that_wraps_its_tensors_goes_on_with_them(tmp_path):
    kwargs: dict[str, Any] = {"settings": {"max_steps": 3}, "trainer_class": WrappingTrainer}
    [whole] = run_on(1, None, tmp_path / "a", **kwargs)
    [resumed] = run_on(1, None, tmp_path / "b", **kwargs, resume=str(tmp_path / "a" / "checkpoint-2"))
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=0)


class Nesting(torch.optim.SGD):
    """Makes state in its first step that no checkpoint holds."""

    kept: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.kept == "beside":
            self.state["all"]["steps"] = 1  # type: ignore[index]
        else:
            for group in self.param_groups:
                for weight in group["params"]:
                    mean = torch.zeros_like(weight)
                    self.state[weight]["means"] = {"fast": mean} if self.kept == "dictionary" else [mean]
        return super().step(closure)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ("beside", "keeps 'all' beside the state of its weights"),
        ("dictionary", "means is a dict of tensors"),
        ("list", "means is a list of tensors"),
    ],
)
def test_state_that_no_checkpoint_holds_is_said_after_the_first_step(kept: str, reason: str, tmp_path):
    class NestingTrainer(RecordingTrainer):
        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
            return type("Nesting", (Nesting,), {"kept": kept}), {"lr": 0.1}

    with pytest.raises(CheckpointError, match=f"the optimizer.*{reason}"):
        run_on(1, None, tmp_path, settings={"max_steps": 5, "save_steps": 4}, trainer_class=NestingTrainer)
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_state_is_looked_at_after_the_first_step_that_makes_any(tmp_path):
    class NestingTrainer(PoisonedTrainer):
        poisoned = (1, 2)

        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
            return type("Nesting", (Nesting,), {"kept": "list"}), {"lr": 0.1}

    steps = SeesRates()
    with pytest.raises(CheckpointError, match="means is a list of tensors"):
        run_on(
            1,
            None,
            tmp_path,
            settings={"max_steps": 5, "save_steps": 5},
            trainer_class=NestingTrainer,
            callbacks=[steps],
        )
    assert len(steps.rates) == 3


def test_the_last_checkpoint_of_the_folder_is_found(tmp_path):
    [first] = run_on(1, None, tmp_path, settings={"num_train_epochs": 1})
    for later in tmp_path.glob("checkpoint-[45]"):
        later.rename(tmp_path / f"other-{later.name}")
    [resumed] = run_on(1, None, tmp_path, settings={"num_train_epochs": 1}, resume=True)
    assert_continues([resumed], [first], 3, tolerance=1e-6)


@pytest.mark.parametrize("asked", [2, 1])
def test_the_loss_of_a_run_that_has_nothing_left_to_train_is_its_mean(asked, tmp_path):
    """Trainer divides by 0.001 steps where there are none."""

    def trained(steps: int, resume: bool) -> Any:
        fresh_accelerator_state()
        settings = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=1)
        plugin = LongContextPlugin(capacity=MOST, **PLUGIN)
        trainer = LongContextTrainer(tiny_llama(), settings, train_dataset=rows(), plugin=plugin)
        return trainer.train(resume_from_checkpoint=resume)

    first, again = trained(2, resume=False), trained(asked, resume=True)
    assert again.global_step == 2
    assert again.training_loss == pytest.approx(first.training_loss, rel=1e-6)
    assert again.metrics["train_loss"] == pytest.approx(first.training_loss, rel=1e-6)


@pytest.mark.parametrize("restore", [False, True])
def test_the_count_of_skipped_steps_goes_on(restore, tmp_path):
    """Also where Trainer replaces callbacks by new ones with the checkpoint's state."""
    settings = {"num_train_epochs": 1, "restore_callback_states_from_checkpoint": restore}
    [first] = run_on(1, None, tmp_path / "first", settings=settings, trainer_class=PoisonedTrainer)
    checkpoint = str(tmp_path / "first" / f"checkpoint-{POISONED_STEPS[0]}")
    [resumed] = run_on(1, None, tmp_path / "on", settings=settings, trainer_class=PoisonedTrainer, resume=checkpoint)
    assert first.series("skipped_steps") == resumed.series("skipped_steps") == [0, 1, 1, 2, 2]
    saved = TrainerState.load_from_json(str(tmp_path / "on" / "checkpoint-5" / "trainer_state.json"))
    callbacks: Any = saved.stateful_callbacks
    assert callbacks["RunState"]["args"]["skipped_steps"] == 2


def test_a_run_that_is_resumed_with_other_settings_has_them_from_the_next_step_on(tmp_path, caplog):
    """Learning rates of a longer run from another rate, as if it had been so from the beginning; and another weight decay."""
    changed = {"max_steps": 6, "learning_rate": 0.02, "weight_decay": 0.25}
    [first] = run_on(1, None, tmp_path / "first", settings={"max_steps": 3, "weight_decay": 0.0})
    [whole] = run_on(1, None, tmp_path / "whole", settings=changed)
    checkpoint = str(tmp_path / "first" / "checkpoint-3")
    [resumed] = run_on(1, None, tmp_path / "on", settings=changed, resume=checkpoint)
    assert resumed.series("learning_rate") == first.series("learning_rate") + whole.series("learning_rate")[3:]
    assert resumed.series("loss")[:3] == first.series("loss")
    groups = json.loads((tmp_path / "on" / "checkpoint-6" / "training_state.json").read_text())["optimizer"]["groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.25}
    assert f"going on from {checkpoint} with other settings: " in caplog.text
    assert "learning_rate " in caplog.text
    assert "-> 0.02, weight_decay 0 -> 0.25" in caplog.text


def test_another_schedule_where_a_run_is_resumed_is_said(tmp_path, caplog):
    run_on(1, None, tmp_path, settings={"max_steps": 1, "lr_scheduler_type": "constant"})
    checkpoint = str(tmp_path / "checkpoint-1")
    run_on(1, None, tmp_path, settings={"max_steps": 2, "lr_scheduler_type": "constant"}, resume=checkpoint)
    assert f"going on from {checkpoint} with other settings: max_steps 1 -> 2\n" in caplog.text
    changed = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}, "max_grad_norm": 0.5}
    run_on(1, None, tmp_path / "on", settings={"max_steps": 2} | changed, resume=checkpoint)
    for line in ("lr_scheduler_type constant -> cosine", "num_cycles", "max_grad_norm 1.0 -> 0.5"):
        assert line in caplog.text


def test_other_settings_are_said_by_one_rank(ranks2, tmp_path):
    run_on(1, None, tmp_path, settings={"max_steps": 1})
    resumed = run_on(2, ranks2, tmp_path, settings={"max_steps": 2}, resume=str(tmp_path / "checkpoint-1"))
    lines = [[message for message in run.messages if "with other settings: " in message] for run in resumed]
    assert [len(messages) for messages in lines] == [1, 0]


def test_another_learning_rate_is_refused_where_rates_follow_from_what_was_measured():
    weight = torch.nn.Parameter(torch.zeros(1))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([weight], lr=0.1))
    load_schedule(plateau, plateau.state_dict(), [0])
    with pytest.raises(CheckpointError, match="another learning_rate under ReduceLROnPlateau"):
        load_schedule(plateau, plateau.state_dict(), [0], {"lr", "betas"})


def test_another_schedule_is_refused_where_rates_follow_from_what_was_measured():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    linear = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for schedule, state, changed, reason in (
        (plateau, plateau.state_dict(), {"lr_scheduler_kwargs"}, "lr_scheduler_kwargs under ReduceLROnPlateau"),
        (plateau, linear.state_dict(), set(), "kind of schedule under ReduceLROnPlateau"),
        (linear, plateau.state_dict(), {"lr_scheduler_type"}, "lr_scheduler_type under the schedule of the checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=f"another {reason}, whose rates follow"):
            load_schedule(schedule, state, [0], changed)


def test_arguments_of_an_optimizer_that_are_numbers_may_change_where_a_run_is_resumed(tmp_path, caplog):
    """A momentum was kept as it had been, without a word."""

    def optimizer_of(folder: Path, step: int) -> list[dict[str, Any]]:
        return json.loads((folder / f"checkpoint-{step}" / "training_state.json").read_text())["optimizer"]["groups"]

    settings = {"optim": "sgd", "lr_scheduler_type": "constant", "save_steps": 1}
    run_on(1, None, tmp_path / "a", settings=settings | {"max_steps": 1, "optim_args": "momentum=0.0"})
    checkpoint = str(tmp_path / "a" / "checkpoint-1")
    longer = settings | {"max_steps": 2}
    run_on(1, None, tmp_path / "b", settings=longer | {"optim_args": "momentum=0.5"}, resume=checkpoint)
    assert [
        {group["momentum"] for group in optimizer_of(tmp_path / name, step)} for name, step in (("a", 1), ("b", 2))
    ] == [
        {0.0},
        {0.5},
    ]
    assert "max_steps 1 -> 2, momentum 0.0 -> 0.5" in caplog.text
    with pytest.raises(
        ValueError, match=r"another value in optim_args \(nesterov default -> True\), which is no number"
    ):
        run_on(1, None, tmp_path, settings=longer | {"optim_args": "momentum=0.5,nesterov=True"}, resume=checkpoint)


def test_rates_of_adapters_are_compared_whatever_the_optimizer():
    state = RunState.__new__(RunState)
    state.arguments = {"optim": "adamw_torch", "loraplus_lr_ratio": "8", "eps": "1"}
    before = {"optim": "adamw_torch_fused", "loraplus_lr_ratio": "16", "eps": "2"}
    changes = state._changed_arguments(before, SimpleNamespace(param_groups=[{}]))
    assert changes == {"loraplus_lr_ratio": "loraplus_lr_ratio 16 -> 8"}


def test_another_seed_and_another_configuration_of_the_same_weights_are_said(tmp_path, caplog):
    run_on(1, None, tmp_path, settings={"max_steps": 1})
    checkpoint = tmp_path / "checkpoint-1"
    [as_before] = run_on(1, None, tmp_path, settings={"max_steps": 2}, resume=str(checkpoint))
    assert "another configuration" not in caplog.text
    config = tiny_llama().config
    config.hidden_act, config.rms_norm_eps = "gelu", 0.25
    assert changed_configuration(SimpleNamespace(config=config), checkpoint) == [
        'hidden_act "silu" -> "gelu"',
        f"rms_norm_eps {tiny_llama().config.rms_norm_eps} -> 0.25",
    ]
    [resumed] = run_on(1, None, tmp_path, settings={"max_steps": 2, "seed": 9}, resume=str(checkpoint))
    assert resumed.series("loss") == as_before.series("loss")
    assert "the order of documents stays that of seed 3, as the checkpoint has it: seed=9 only sets that" in caplog.text


def test_other_documents_are_refused(uninterrupted, tmp_path):
    folder, _ = uninterrupted
    other = rows()
    other[4], other[5] = other[5], other[4]
    with pytest.raises(
        ValueError, match=r"was made on documents with fingerprint .*Give the same data set in the same"
    ):
        run_on(1, None, tmp_path, rows=other, resume=str(folder / f"checkpoint-{SEVENTH}"))


def test_other_tokens_of_documents_of_the_same_lengths_are_refused(uninterrupted, tmp_path):
    folder, _ = uninterrupted
    other = [{name: [*values[:-1], 7] for name, values in row.items()} for row in rows()]
    with pytest.raises(
        ValueError, match=r"documents of the same lengths with other tokens or labels: .* the same data set"
    ):
        run_on(1, None, tmp_path, rows=other, resume=str(folder / f"checkpoint-{SEVENTH}"))


@pytest.mark.parametrize(
    ("plugin", "settings", "message"),
    [
        (
            {"global_batch_tokens": 211},
            {},
            r"resuming with \{'global_batch_tokens': 211\}, .* \{'global_batch_tokens': 210\}",
        ),
        ({"global_batch_documents": 4}, {}, r"'global_batch_documents': 4\}, .* \{'global_batch_documents': None\}"),
        (PLUGIN, {"data_seed": 4}, r"resuming with \{'seed': 4\}, but the checkpoint was made with \{'seed': 3\}"),
    ],
)
def test_other_batches_or_another_order_are_refused(plugin, settings, message, uninterrupted, tmp_path):
    folder, _ = uninterrupted
    with pytest.raises(ValueError, match=message):
        train(
            "llama",
            rows(),
            plugin | {"capacity": MOST},
            SETTINGS | settings | {"output_dir": tmp_path},
            resume=str(folder / f"checkpoint-{SEVENTH}"),
        )


def test_another_autocast_is_refused():
    """float16 too, which CPUs do not compute in here."""
    run: dict[str, Any] = {"global_batch_documents": 4, "global_batch_tokens": None, "seed": 3, "data_fingerprint": "f"}

    def resumed(before: dict[str, Any], **now: bool) -> RunState:
        checkpoint, state = (
            TrainerState(stateful_callbacks={"RunState": {"args": run | before}}),
            RunState(**run, **now),
        )
        state.restore(checkpoint, {})
        return state

    assert resumed({"bf16": False}, bf16=False, fp16=True).fp16  # older than this field
    assert resumed({"bf16": False, "fp16": True}, bf16=False, fp16=True).state()["args"]["fp16"]
    with pytest.raises(
        ValueError, match=r"fp16=False, but .* with fp16=True: .* Valid: training.fp16: true in YAML, Tr"
    ):
        resumed({"bf16": False, "fp16": True}, bf16=False, fp16=False)
    with pytest.raises(ValueError, match=r"bf16=True, fp16=False, but .* TrainingArguments\(bf16=False, fp16=True\)"):
        resumed({"bf16": False, "fp16": True}, bf16=True, fp16=False)
    with pytest.raises(ValueError, match=r"bf16=False, but .*bf16=True: .* Valid: training.bf16: true or auto in YAML"):
        resumed({"bf16": True}, bf16=False, fp16=False)


def test_adapters_on_weights_in_another_dtype_are_refused(tmp_path):
    """A checkpoint holds none of these, in whose place others would go on."""

    def run(dtype: torch.dtype, **options: Any) -> Run:
        adapters = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["v_proj"])
        model: Any = get_peft_model(tiny_llama(dtype), adapters)
        settings = {"output_dir": tmp_path, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        return train(model, documents([9, 20]), {"capacity": 32}, settings, **options)

    whole = run(torch.bfloat16)
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(
        ValueError, match=r"adapters on weights in float32, but .* in bfloat16: .* Valid: the model in bf"
    ):
        run(torch.float32, resume=checkpoint)
    assert run(torch.bfloat16, resume=checkpoint).series("loss") == whole.series("loss")


def test_adapters_on_another_model_of_the_same_shapes_are_refused(tmp_path):
    def run(change: float, **options: Any) -> Run:
        base = tiny_llama()
        with torch.no_grad():
            base.model.layers[0].mlp.up_proj.weight += change
        model: Any = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["v_proj"]))
        settings = {"output_dir": tmp_path, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        return train(model, documents([9, 20]), {"capacity": 32}, settings, **options)

    whole = run(0)
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match=r"on another model: 1 of 12 of .*up_proj.*Valid: that model"):
        run(1e-3, resume=checkpoint)
    assert run(0, resume=checkpoint).series("loss") == whole.series("loss")


def test_adapters_that_are_resumed_with_another_scale_are_said(tmp_path, caplog):
    def run(alpha: int, **options: Any) -> Run:
        adapters = LoraConfig(
            r=4, lora_alpha=alpha, task_type="CAUSAL_LM", target_modules=["v_proj", "q_proj", "k_proj"]
        )
        settings = {"output_dir": tmp_path, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        model: Any = get_peft_model(tiny_llama(), adapters)
        return train(model, documents([9, 20]), {"capacity": 32}, settings, **options)

    run(8)
    run(8, resume=str(tmp_path / "checkpoint-1"))
    assert "another configuration" not in caplog.text
    run(64, resume=str(tmp_path / "checkpoint-1"))
    assert caplog.text.rstrip().endswith("with a model of another configuration: lora_alpha 8 -> 64")


def test_a_checkpoint_of_another_trainer_is_refused(uninterrupted, tmp_path):
    folder, _ = uninterrupted
    state = json.loads((folder / "checkpoint-1" / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["RunState"]
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "model.safetensors").symlink_to(folder / "checkpoint-1" / "model.safetensors")
    with pytest.raises(ValueError, match="was not saved by LongContextTrainer"):
        run_on(1, None, tmp_path, resume=str(tmp_path))
