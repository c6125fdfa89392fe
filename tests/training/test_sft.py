"""TRL's SFTTrainer under LongContextMixin: TRL makes documents of conversations, planned steps train them.

Losses, gradient norms and weights are those of a loop over the same documents with plain attention in one process, and
of LongContextTrainer: float32, 1e-5 relative (gradients and weights of adapters: 1e-4, as in
tests/models/adapters/test_adapters.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from hf_longctx.planner import GlobalBatches
from tests.builders.training.sft_runs import (
    CAPACITY,
    DOCUMENTS,
    EPOCHS,
    LORA,
    TURNS,
    conversations,
    settings,
    sft_trainer,
)
from tests.builders.training_runs import ANY_MODELS, MODELS, Rows, reference, step_loss, train
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool


def with_adapters(family: str, weights: dict[str, torch.Tensor]) -> Any:
    """With the router loss that TRL switches on for every mixture, weighted as the model's configuration says."""
    fields = {"output_router_logits": True} if family == "gpt_oss" else {}
    model = get_peft_model(ANY_MODELS[family](**fields), LoraConfig(task_type="CAUSAL_LM", **LORA))
    model.load_state_dict(weights)
    return model


@dataclass
class Trained:
    log: list[dict[str, float]]
    begun: dict[str, torch.Tensor]
    """Weights before training: TRL has drawn adapters."""
    weights: dict[str, torch.Tensor]
    rows: Rows
    """Documents as TRL made them."""
    evaluation: dict[str, float]

    def series(self, name: str) -> list[float]:
        return [entry[name] for entry in self.log if name in entry]


def sft(output_dir: Any, family: str, lora: bool, capacity: int) -> Trained:
    """Runs on this rank, alone or in a pool."""
    with in_order_communicators():
        trainer = sft_trainer(output_dir, lora, capacity, family=family)
        begun = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        trainer.train()
        evaluation = trainer.evaluate(Dataset.from_list(conversations()[:4]))
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    rows = trainer.train_dataset.select_columns(["input_ids", "labels"]).to_list()
    return Trained(list(trainer.state.log_history), begun, weights, rows, evaluation)


@pytest.mark.parametrize(
    ("family", "lora"),
    [("llama", False), ("qwen3", True), ("gpt_oss", True)],
    ids=["llama, all weights", "qwen3, lora", "gpt_oss, lora"],
)
def test_it_trains_what_a_loop_over_documents_and_our_trainer_train(
    family: str, lora: bool, ranks2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone, one, two = [
        sft(tmp_path / "one", family, lora, 2 * CAPACITY),
        *ranks2.run(sft, str(tmp_path / "two"), family, lora, CAPACITY // 2),
    ]
    rows, lengths = alone.rows, np.array([len(row["input_ids"]) for row in alone.rows])
    assert lengths.tolist() == [asked + answered + 4 for asked, answered in TURNS]
    learned = [sum(label != -100 for label in row["labels"]) for row in rows]
    assert learned == [answered + 1 for _, answered in TURNS], "only what the assistant says has labels"

    name = "lora" if lora else family
    monkeypatch.setitem(MODELS, "lora", lambda: with_adapters(family, alone.begun))
    batches = GlobalBatches(lengths, 3, documents=DOCUMENTS)
    losses, norms, weights = reference(name, rows, batches, EPOCHS, settings(tmp_path))
    plugin = {"capacity": 2 * CAPACITY, "global_batch_documents": DOCUMENTS}
    ours = train(name, rows, plugin, settings(tmp_path / "ours"))
    assert len(losses) == EPOCHS * len(TURNS) // DOCUMENTS
    assert sum(one.series("split_documents")) > 0
    for run in (alone, one, two):
        assert run.series("loss") == pytest.approx(losses, rel=1e-5)
        assert run.series("loss") == pytest.approx(ours.series("loss"), rel=1e-5)
        assert run.series("grad_norm") == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(run.weights, weights, rtol=0, atol=1e-4 if lora else 1e-5)
        plain = ANY_MODELS[name]()
        plain.load_state_dict(run.weights)
        with torch.no_grad():
            evaluated = float(step_loss(plain.eval(), rows[:4], router=False))
        assert run.evaluation["eval_loss"] == pytest.approx(evaluated, rel=1e-5)
    torch.testing.assert_close(one.weights, two.weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"packing": True, "max_length": 64}, r"packing=True joins documents .*; max_length=64 cuts documents"),
        ({"eval_packing": True}, "eval_packing=True joins documents"),
        (
            {"max_length": 1024},
            r"set it to None. To cut: LongContextPlugin\(long_documents='truncate', longest_document=1024",
        ),
        ({"loss_type": "dft"}, "loss_type='dft' is another loss"),
        ({"activation_offloading": True}, r"LongContextPlugin\(activation_offload=1.0\) does it"),
    ],
)
def test_what_would_be_done_otherwise_is_refused(changed: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        sft_trainer(tmp_path, **changed)
