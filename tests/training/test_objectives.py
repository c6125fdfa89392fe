"""Trainer classes whose objective or loops planned steps would skip without a word are refused when the class is made."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig, PeftMixedModel, get_peft_model
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

from hf_longctx import LongContextMixin, LongContextPlugin, LongContextTrainer
from hf_longctx.training.arguments import NEVER_CALLED, refuse_sharded_optimizer, say_unused_saves
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import arguments, fresh_accelerator_state

OTHERS = ("DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")


def combined(*bases: Any, **methods: Any) -> Any:
    return type("Combined", bases, methods)


def method(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for a hook that somebody wrote."""


@pytest.mark.parametrize("name", [name for name in OTHERS if hasattr(trl, name)])
def test_trainers_with_another_objective_are_refused_by_class(name: str):
    other = getattr(trl, name)
    with pytest.raises(
        TypeError, match=rf"Combined: {name}\.(compute_loss|training_step|train) .*trl\.SFTTrainer.*DPO, KTO"
    ):
        combined(LongContextMixin, other)


def test_trainers_with_the_same_objective_are_taken_silently():
    for other in (Trainer, Seq2SeqTrainer, trl.SFTTrainer):
        assert issubclass(combined(LongContextMixin, other), other)
    before = type("Before", (), {"training_step": method})
    assert combined(before, LongContextTrainer).training_step is method


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_hooks_that_are_never_called_are_refused_wherever_they_stand(name: str):
    hook = {name: method}
    somebody = type("Somebody", (Trainer,), hook)
    sft = (LongContextMixin, trl.SFTTrainer)
    for bases, own in (((LongContextTrainer,), hook), ((LongContextMixin, somebody), {}), (sft, hook)):
        reason = re.escape(NEVER_CALLED[name])
        with pytest.raises(TypeError, match=rf"\.{name} is not called: {reason}\. Leave it out, or train without"):
            combined(*bases, **own)


@pytest.mark.parametrize("name", ["save_model", "_save"])
def test_ways_of_saving_that_checkpoints_do_not_call_are_said(name: str, caplog: pytest.LogCaptureFixture):
    somebody = type("Somebody", (Trainer,), {name: method})
    for cls, strategy, process in (
        (combined(LongContextTrainer, **{name: method}), "steps", 0),
        (combined(LongContextMixin, somebody), "epoch", 0),
        (combined(LongContextTrainer, **{name: method}), "no", 0),
        (combined(LongContextTrainer, **{name: method}), "steps", 1),
        (combined(LongContextMixin, trl.SFTTrainer), "steps", 0),
    ):
        trainer = cls.__new__(cls)
        trainer.args = SimpleNamespace(save_strategy=strategy, process_index=process)
        say_unused_saves(trainer)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"not called for checkpoints, which are written beside training: Combined.{name}. ")
    assert f"training: Somebody.{name}. " in second


@pytest.mark.parametrize("name", ["training_step", "evaluation_loop", "get_train_dataloader", "train"])
def test_hooks_behind_ours_are_refused(name: str):
    somebody = type("Somebody", (Trainer,), {name: method})
    with pytest.raises(TypeError, match=rf"Somebody\.{name} is hidden by .*before LongContextMixin that calls super"):
        combined(LongContextMixin, somebody)


def test_what_is_given_by_position_or_set_on_the_trainer_is_refused_too(tmp_path):
    fresh_accelerator_state()
    plugin, args = LongContextPlugin(capacity=32), arguments(tmp_path)
    with pytest.raises(ValueError, match=r"data_collator=.* would not be used"):
        LongContextTrainer(tiny_llama(), args, lambda rows: rows, plugin=plugin)
    by_position = (tiny_llama(), args, None, [], None, None, None, method)
    with pytest.raises(ValueError, match="compute_loss_func is given logits"):
        LongContextTrainer(*by_position, plugin=plugin)
    trainer = LongContextTrainer(tiny_llama(), args, train_dataset=[], plugin=plugin)
    trainer.compute_loss = method
    with pytest.raises(TypeError, match="compute_loss was set on this LongContextTrainer, and is not called"):
        trainer.train()


def test_names_of_hooks_that_are_never_called_are_trainers():
    assert [name for name in NEVER_CALLED if not hasattr(Trainer, name)] == []


def test_what_is_set_later_and_would_be_ignored_or_summed_is_refused(tmp_path):
    fresh_accelerator_state()
    plugin, args = LongContextPlugin(capacity=32), arguments(tmp_path)
    trainer = LongContextTrainer(tiny_llama(), args, train_dataset=[{"input_ids": [1, 2, 3]}] * 4, plugin=plugin)
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2 was set since .* 2 steps would be summed"):
        trainer.train()
    trainer.args.gradient_accumulation_steps = 1
    before, trainer.data_collator = trainer.data_collator, method
    with pytest.raises(ValueError, match="data_collator=function would not be used"):
        trainer.train()
    trainer.data_collator, trainer.model = before, tiny_llama()
    with pytest.raises(ValueError, match="LlamaForCausalLM, is another than the one that the trainer was made with"):
        trainer.train()


def test_rates_of_loraplus_beside_an_optimizer_that_has_its_rates_are_refused(tmp_path):
    fresh_accelerator_state()
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    own = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad])
    plugin = LongContextPlugin(capacity=32, loraplus_lr_ratio=16.0)
    with pytest.raises(ValueError, match=r"loraplus_lr_ratio=16.0 would change nothing: optimizers=\(SGD"):
        LongContextTrainer(model, arguments(tmp_path), train_dataset=[], plugin=plugin, optimizers=(own, None))


def test_functions_over_logits_that_are_set_later_are_refused_when_they_would_be_called(tmp_path):
    fresh_accelerator_state()
    rows = [{"input_ids": [1, 2, 3, 4]}] * 2
    trainer = LongContextTrainer(
        tiny_llama(), arguments(tmp_path), train_dataset=rows, eval_dataset=rows, plugin=LongContextPlugin(capacity=32)
    )
    trainer.compute_metrics = method
    for call in (trainer.evaluate, trainer.train):
        with pytest.raises(ValueError, match="compute_metrics needs the logits"):
            call()


def test_batches_of_other_loaders_are_refused_and_those_for_tests_are_planned(tmp_path):
    fresh_accelerator_state()
    rows = [{"input_ids": [1, 2, 3, 4]}] * 2
    trainer = LongContextTrainer(
        tiny_llama(), arguments(tmp_path), train_dataset=rows, plugin=LongContextPlugin(capacity=32)
    )
    planned = trainer.evaluation_loop(trainer.get_test_dataloader(rows), "test", metric_key_prefix="test")
    assert planned.metrics["test_loss"] == trainer.evaluate(rows)["eval_loss"]
    with pytest.raises(TypeError, match=r"a batch is a dict: .*get_test_dataloader\(data set\)"):
        trainer.evaluation_loop(rows, "test")
    with pytest.raises(TypeError, match="a batch is a dict"):
        trainer.training_step(trainer.model, rows[0])


def test_a_metric_that_no_evaluation_gives_is_refused_before_the_first_step(tmp_path):
    rows = [{"input_ids": [1, 2, 3, 4]}] * 2

    class Adds(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_own"] = 1.0

    def trained(metric: str, *callbacks: Any, **settings: Any) -> Any:
        fresh_accelerator_state()
        args = arguments(tmp_path, eval_strategy="epoch", metric_for_best_model=metric, num_train_epochs=1)
        trainer = LongContextTrainer(
            *(tiny_llama(), args), train_dataset=rows, eval_dataset={"a": rows},
            plugin=LongContextPlugin(capacity=32, **settings), callbacks=list(callbacks),
        )  # fmt: skip
        trainer.train()
        return trainer.state.best_metric

    for metric, valid in (
        ("accuracy", "eval_a_loss, "),
        ("a_entropy", "token_metrics=True"),
        ("loss", "eval_a_loss, "),
    ):
        with pytest.raises(ValueError, match=f"metric_for_best_model='{metric}' is none of what .*{valid}"):
            trained(metric)
    assert trained("own", Adds()) == 1.0
    assert trained("eval_a_entropy", token_metrics=True) > 0


def test_an_optimizer_that_was_made_before_the_model_is_sharded_is_refused():
    weight = torch.nn.Parameter(torch.zeros(1))
    sharded = SimpleNamespace(is_fsdp_enabled=True, world=SimpleNamespace(sharding="zero1"))
    with pytest.raises(
        ValueError, match=r"sharding='zero1': optimizers=\(SGD, .*optimizer_cls_and_kwargs=\(SGD, settings"
    ):
        refuse_sharded_optimizer(sharded, (torch.optim.SGD([weight]), None))
    refuse_sharded_optimizer(sharded, (None, None))
    sharded.is_fsdp_enabled = False
    refuse_sharded_optimizer(sharded, (torch.optim.SGD([weight]), None))


def test_models_that_cannot_be_trained_are_refused_with_what_would_be(tmp_path):
    def trained(model: Any) -> None:
        fresh_accelerator_state()
        args, rows = arguments(tmp_path), [{"input_ids": [1, 2, 3, 4]}] * 2
        LongContextTrainer(model, args, train_dataset=rows, plugin=LongContextPlugin(capacity=32)).train()

    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", inference_mode=True)
    for model, error, message in (
        (
            tiny_llama().requires_grad_(False),
            ValueError,
            "none of the model's 21 parameters is trained.*requires_grad_",
        ),
        (get_peft_model(tiny_llama(), lora), ValueError, r"none of .*is_trainable=True"),
        (torch.compile(tiny_llama()), TypeError, r"OptimizedModule around a LlamaForCausalLM.*model\._orig_mod"),
        (PeftMixedModel(tiny_llama(), lora), TypeError, "class PeftMixedModel.*without mixed=True"),
    ):
        with pytest.raises(error, match=message):
            trained(model)


def test_a_model_that_was_changed_since_its_trainer_was_made_is_refused(tmp_path):
    def resized(trainer: Any) -> None:
        trainer.model.resize_token_embeddings(140)

    def merged(trainer: Any) -> None:
        trainer.model.merge_adapter()

    def switched(trainer: Any) -> None:
        trainer.train()
        trainer.model.add_adapter("b", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
        trainer.model.set_adapter("b")

    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for model, change, message in (
        (tiny_llama(), resized, r"another output head since .* Valid: resize_token_embeddings\(\.\.\.\)"),
        (
            get_peft_model(tiny_llama(), lora),
            merged,
            r"adapters default are merged .* Valid: model\.unmerge_adapter\(\)",
        ),
        (
            get_peft_model(tiny_llama(), lora),
            switched,
            r"changes 4 weights .* \(2, 64\), and lacks 4 .* Valid: a new t",
        ),
    ):
        fresh_accelerator_state()
        args, rows = arguments(tmp_path, max_steps=1), [{"input_ids": [1, 2, 3, 4]}] * 2
        trainer = LongContextTrainer(model, args, train_dataset=rows, plugin=LongContextPlugin(capacity=32))
        change(trainer)
        with pytest.raises(ValueError, match=message):
            trainer.train()


def test_generation_in_evaluation_is_refused(tmp_path):
    fresh_accelerator_state()
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], predict_with_generate=True)
    with pytest.raises(ValueError, match="predict_with_generate=True generates text in evaluation"):
        combined(LongContextMixin, Seq2SeqTrainer)(tiny_llama(), args, plugin=LongContextPlugin(capacity=32))
