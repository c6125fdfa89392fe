"""Models that transformers loads in parts and computes wrongly are refused before they are trained, in a world of any size."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import ApertusConfig, ApertusForCausalLM, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from hf_longctx.certificate import loaded_in_parts
from hf_longctx.certificate.loaded_in_parts import Trial, refuse_wrong_parts
from tests.builders.tiny_models import tiny_general
from tests.worlds.rank_pool import RankPool

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
APERTUS = ApertusConfig(vocab_size=128, num_key_value_heads=4, max_position_embeddings=64, **SIZES)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loaded_in_parts, "_seen", {})
    return tmp_path / "cache"


def refusal(folder: str, settings: dict[str, int]) -> tuple[str, list[str]]:
    """Return why a model is refused, empty where it is not, and what rank 0 warns of."""
    warnings: list[str] = []
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**settings))
    with mock.patch.object(loaded_in_parts.logger, "warning", warnings.append):
        try:
            refuse_wrong_parts(model, settings)
        except ValueError as error:
            return str(error), warnings
    return "", warnings


@pytest.mark.processes
def test_a_plan_that_leaves_out_gradients_is_refused_in_a_larger_world_too(ranks4: RankPool, tmp_path: Path):
    """Each rank has those of its own features; nobody sums them, and the loss does not show it."""
    AutoModelForCausalLM.from_config(APERTUS).save_pretrained(tmp_path)
    for answer, warnings in ranks4.run(refusal, str(tmp_path), {"tp_size": 4}):
        assert "tp_size=4: ApertusForCausalLM as transformers loads it in parts does not compute as one" in answer
        assert re.search(r"in a tiny copy over 2 ranks, the gradient of model\.layers\..*alpha_[pn] differs by", answer)
        assert not warnings


@pytest.mark.processes
def test_each_setting_has_a_verdict_of_its_own_which_is_kept(own_cache: Path):
    trial = loaded_in_parts._known(ApertusForCausalLM, APERTUS, ["fsdp_size", "tp_size"])
    assert trial.differs.keys() == {"tp_size"}
    assert not trial.unknown
    [kept] = own_cache.rglob("*.json")
    assert loaded_in_parts.cache.read(kept.stem, Trial) == trial


@pytest.mark.processes
@pytest.mark.skipif(
    not hasattr(transformers, "BailingHybridConfig"), reason="this transformers does not have the model"
)
def test_weights_that_are_put_together_wrongly_are_seen():
    """Convolutions lie in a file in three pieces, of each of which a rank reads its part."""
    cls: Any = transformers.BailingHybridForCausalLM
    trial = loaded_in_parts._tried(cls, cls.config_class(), ["fsdp_size"])
    assert trial.differs.keys() == {"fsdp_size"}


class DividedTwice(LlamaForCausalLM):
    """Has transformers 5.20 to 5.22 divide gradients as those of dispatched experts."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().from_pretrained(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(4.0)
                module.set_force_sum_reduction_for_comms(True)
        return model


@pytest.mark.processes
def test_gradients_are_summed_as_in_training_however_transformers_averages_them():
    config = LlamaConfig(vocab_size=128, num_key_value_heads=4, **SIZES)
    assert loaded_in_parts._tried(DividedTwice, config, ["fsdp_size"]) == Trial()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"WORKER": "import sys; sys.exit('no memory')"}, "no memory"),
        ({"WORKER": "import time; time.sleep(60)", "LONGEST_SECONDS": 0.2}, "2 processes have not ended within 0.2 s"),
    ],
)
def test_what_cannot_be_tried_is_unknown_and_not_kept(
    change: dict[str, Any], reason: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in change.items():
        monkeypatch.setattr(loaded_in_parts, name, value)
    model = tiny_general("qwen3")
    trial = loaded_in_parts._known(type(model), model.config, ["tp_size"])
    assert trial == Trial(unknown={"tp_size": reason})
    assert not list(own_cache.rglob("*.json"))
