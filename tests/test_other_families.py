"""A model without attention layers of ours, wherever a run begins: refused by name, before anything else is read of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import MambaConfig, MambaForCausalLM, TrainingArguments

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.commands.estimate import estimate
from hf_longctx.commands.run_memory import planned_run
from hf_longctx.config import ConfigError, resolve
from hf_longctx.settings import Config
from hf_longctx.settings.families import refused_directory, refused_family

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
NO_ATTENTION = (
    "MambaForCausalLM has no attention layer that hf_longctx can patch; it knows BloomAttention, LlamaAttention"
)


@pytest.fixture
def mamba(tmp_path: Path) -> Path:
    MambaConfig(**SIZES, architectures=["MambaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("capacity", [0, 128])
@pytest.mark.parametrize("given", ["model", "model_init"])
def test_the_trainer_refuses_a_mamba_by_name(given: str, capacity: int, tmp_path: Path):
    model = MambaForCausalLM(MambaConfig(**SIZES))
    with pytest.raises(ValueError, match=NO_ATTENTION):
        LongContextTrainer(
            **({"model": model} if given == "model" else {"model_init": lambda: model}),
            args=TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[]),
            train_dataset=Dataset.from_dict({"input_ids": [[1, 2, 3]]}),
            plugin=LongContextPlugin(capacity=capacity),
        )


def test_the_command_line_refuses_a_mamba_by_name(mamba: Path, tmp_path: Path):
    """`train`, `train --dry-run` and `config` read the file alike."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [1, 2, 3]}))
    reason = re.escape(
        "'mamba' makes a MambaForCausalLM, which has no attention layers that hf_longctx can run over layouts; valid: llama"
    )
    for number, (key, model) in enumerate(
        {"path": {"path": str(mamba)}, "random_init.model_type": {"random_init": {"model_type": "mamba"}}}.items()
    ):
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps({"model": model, "data": {"path": str(rows)}, "longctx": {"capacity": 64}}))
        with pytest.raises(ConfigError, match=f"model.{re.escape(key)}: .*{reason}"):
            resolve(file)
    with pytest.raises(ValueError, match="model_type='mamba' cannot be counted; valid: llama"):
        estimate(str(mamba), "1M", 8)


def test_a_dry_run_refuses_code_that_comes_with_a_model_by_its_layers(mamba: Path):
    """Whose configuration says nothing of its class: what is made of it does."""
    config = json.loads((mamba / "config.json").read_text()) | {"auto_map": {}}
    (mamba / "config.json").write_text(json.dumps(config))
    assert refused_directory(str(mamba)) is None
    settings = {"model": {"path": str(mamba)}, "data": {"path": str(mamba)}, "longctx": {"capacity": 64}}
    with pytest.raises(ValueError, match=NO_ATTENTION):
        planned_run(Config.model_validate(settings), 1)


def test_types_that_make_a_supported_model_are_supported():
    assert [refused_family(name) for name in ("llama", "mpt", "internlm3", "iquestcoder", "somebodys_own")] == [
        None
    ] * 5
    assert "'qwen2' makes a Qwen2ForCausalLM" in str(refused_family("qwen2"))
