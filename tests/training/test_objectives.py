"""Trainer classes whose objective or loops planned steps would skip without a word are refused when the class is made."""

from typing import Any

import pytest
import trl
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from hf_longctx import LongContextMixin, LongContextPlugin, LongContextTrainer
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


@pytest.mark.parametrize("name", ["compute_loss", "prediction_step"])
def test_hooks_that_are_never_called_are_refused_wherever_they_stand(name: str):
    hook = {name: method}
    somebody = type("Somebody", (Trainer,), hook)
    sft = (LongContextMixin, trl.SFTTrainer)
    for bases, own in (((LongContextTrainer,), hook), ((LongContextMixin, somebody), {}), (sft, hook)):
        with pytest.raises(TypeError, match=rf"\.{name} is not called: .* Leave it out, or train without"):
            combined(*bases, **own)


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


def test_generation_in_evaluation_is_refused(tmp_path):
    fresh_accelerator_state()
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], predict_with_generate=True)
    with pytest.raises(ValueError, match="predict_with_generate=True generates text in evaluation"):
        combined(LongContextMixin, Seq2SeqTrainer)(tiny_llama(), args, plugin=LongContextPlugin(capacity=32))
