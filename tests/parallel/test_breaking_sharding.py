"""Settings that sharded or planned training cannot honour are refused before anything runs, and what looks like them is not."""

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers.distributed.configuration_utils import DistributedConfig

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.training.arguments import adapted
from tests.builders.tiny_models import tiny_llama
from tests.builders.training.sharded_runs import refused
from tests.builders.training_runs import arguments
from tests.worlds.rank_pool import RankPool

REENTRANT = r"gradient_checkpointing_kwargs=.* means use_reentrant=True, .* add 'use_reentrant': False"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reentrant": ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, REENTRANT),
    "reentrant by torch's default": ({"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, REENTRANT),
    "layer by layer": ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise' changes weights during"),
    "in backward": ({"optim": "adalomo"}, "optim='adalomo' changes weights during backward, .* 'adamw_torch'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_work_inside_backward_are_refused(name, tmp_path):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        adapted(
            arguments(tmp_path, gradient_checkpointing=True, **settings), tiny_llama(), LongContextPlugin(capacity=8)
        )


@pytest.mark.parametrize("kwargs", [None, {}, {"every_n_layers": 2}, {"offload": True}, {"use_reentrant": False}])
def test_checkpointing_that_is_not_reentrant_is_accepted(kwargs, tmp_path):
    """Offload goes to pinned host memory, which there is on GPUs alone."""
    args = arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    on_cpu = not (kwargs or {}).get("offload")
    assert adapted(args, tiny_llama(), LongContextPlugin(capacity=8), on_cpu=on_cpu).gradient_checkpointing


def test_reentrant_settings_do_not_matter_without_checkpointing(tmp_path):
    args = arguments(tmp_path, gradient_checkpointing_kwargs={"use_reentrant": True})
    assert not adapted(args, tiny_llama(), LongContextPlugin(capacity=8)).gradient_checkpointing


@pytest.mark.parametrize("settings", [{"sharding": "zero1"}, {"fsdp": True}], ids=str)
def test_optimizers_of_whole_weights_are_refused_where_they_are_in_parts(settings, ranks2: RankPool, tmp_path):
    reasons = {
        "adafactor": "takes means of whole rows",
        "adagrad": "makes the state of whole weights before they are sharded",
    }
    for optim, reason in reasons.items():
        for message in ranks2.run(refused, str(tmp_path), {"optim": optim, **settings}):
            assert f"optim={optim!r} {reason}" in message


def test_adafactor_is_accepted_where_weights_are_whole(tmp_path):
    for sharding in ("ddp", "zero3"):  # one process holds everything anyway
        plugin = LongContextPlugin(capacity=8, sharding=sharding)
        assert adapted(arguments(tmp_path, optim="adafactor"), tiny_llama(), plugin).optim == "adafactor"


def test_pipeline_stages_of_a_loaded_model_need_as_many_processes(tmp_path):
    model = tiny_llama()
    model.config.distributed_config = DistributedConfig(pp_size=2)
    with pytest.raises(
        ValueError, match=r"pipeline_stages=2: it must divide the 1 processes \(1 = 0 \* 2 \+ 1\); valid: \[1\]"
    ):
        LongContextTrainer(model, arguments(tmp_path), plugin=LongContextPlugin(capacity=16))


def test_adapters_on_a_model_that_was_loaded_in_stages_are_refused(tmp_path):
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.config.distributed_config = DistributedConfig(pp_size=2)
    with pytest.raises(ValueError, match="adapters were added to a model that was loaded in pp_size=2 stages"):
        LongContextTrainer(model, arguments(tmp_path), plugin=LongContextPlugin(capacity=16))
