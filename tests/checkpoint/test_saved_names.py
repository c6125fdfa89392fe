"""Names of weights in the files of a model that was made of a configuration and sharded: those of the plain model."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from hf_longctx.checkpoint.export import named_once
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import RecordingTrainer, documents, train
from tests.worlds.rank_pool import RankPool

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class SavingTrainer(RecordingTrainer):
    """Saves the model when it has trained."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        self.save_model()
        return result


def save_sharded(folder: str) -> None:
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=128, **SIZES))
    plugin = {"capacity": 16, "global_batch_documents": 2, "sharding": "zero3"}
    train(model, documents([9, 12]), plugin, {"output_dir": folder, "max_steps": 1}, trainer_class=SavingTrainer)


def names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sorted(file.keys())


@pytest.mark.processes
def test_a_sharded_model_that_was_not_loaded_is_saved_with_the_names_of_a_plain_one(ranks2: RankPool, tmp_path: Path):
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=128, **SIZES)).save_pretrained(tmp_path / "plain")
    ranks2.run(save_sharded, str(tmp_path / "sharded"))
    assert names(tmp_path / "sharded") == names(tmp_path / "plain")


def test_only_a_tied_weight_is_left_out_under_its_second_name():
    """Such as FSDP2 gathers them: each name has a tensor of its own."""
    model = tiny_llama(tie_word_embeddings=True)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert weights.keys() - named_once(model, weights).keys() == {"lm_head.weight"}
    assert named_once(model, {"lm_head.weight": weights["lm_head.weight"]}), "a last stage alone"
    untied = weights | {"lm_head.weight": weights["lm_head.weight"] + 1}
    assert named_once(model, untied).keys() == weights.keys(), "a head that was untied since it was loaded"
    assert named_once(model, None) is None
