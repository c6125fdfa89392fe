"""A run that is continued on other numbers of ranks, with other sharding and other planners, is the undisturbed run: the same
losses and gradient norms, each document once.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders.training.elastic_runs import STEPS, travel
from tests.builders.training.sharded_runs import run
from tests.builders.training_runs import MODELS, Run
from tests.builders.transformers_versions import skip_unless_loaded
from tests.worlds.rank_pool import RankPool


@pytest.fixture(scope="module")
def undisturbed(ranks1: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model, adapter) -> what one process saw."""
    seen: dict[tuple[str, str], Run] = {}

    def of(model: str, adapter: str = "full") -> Run:
        if (model, adapter) not in seen:
            output = str(tmp_path_factory.mktemp("undisturbed"))
            [seen[model, adapter]] = ranks1.run(run, output, model=model, adapter=adapter, steps=STEPS, in_order=False)
        return seen[model, adapter]

    return of


def assert_loads(folder: Path, expected: Run) -> None:
    """Plain transformers reads a checkpoint's folder."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    for name, weight in expected.weights.items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-4)


def test_ranks_sharding_and_planner_change_at_every_checkpoint(
    undisturbed, ranks1, ranks2, ranks3, ranks4, tmp_path: Path
):
    legs = [
        (ranks4, {"sharding": "ddp"}),
        (ranks2, {"sharding": "zero3", "file_bytes": 2**14}),
        (ranks3, {"sharding": "zero1", "planner": "static_cp"}),
        (ranks1, {}),
        (ranks4, {"sharding": "zero2", "file_bytes": 2**14}),
    ]
    travel(legs, undisturbed("llama"), tmp_path)
    assert len(list((tmp_path / f"checkpoint-{STEPS}").glob("model-*.safetensors"))) == 4
    assert_loads(tmp_path / f"checkpoint-{STEPS}", undisturbed("llama"))


def test_tied_weights_travel_once(undisturbed, ranks1, ranks2, tmp_path: Path):
    legs = [(ranks2, {"sharding": "zero3"}), (ranks1, {})]
    travel([(pool, options | {"model": "bloom"}) for pool, options in legs], undisturbed("bloom"), tmp_path)
    assert_loads(tmp_path / f"checkpoint-{STEPS}", undisturbed("bloom"))


def test_adapters_travel_too(undisturbed, ranks1, ranks2, ranks4, tmp_path: Path):
    legs = [(ranks2, {"sharding": "zero3"}), (ranks4, {"sharding": "ddp"}), (ranks1, {})]
    runs = travel(
        [(pool, options | {"adapter": "lora"}) for pool, options in legs], undisturbed("llama", "lora"), tmp_path
    )
    saved = tmp_path / f"checkpoint-{STEPS}"
    assert (saved / "adapter_config.json").exists()
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(MODELS["llama"](), str(saved)).state_dict()
    expected = undisturbed("llama", "lora").weights
    assert runs
    for name in [name for name in expected if "lora" in name]:
        torch.testing.assert_close(loaded[name], expected[name], rtol=0, atol=1e-4)


MESHES: list[tuple[str, dict[str, int]]] = [
    ("ranks2", {"tp_size": 2}),
    ("ranks2", {"fsdp_size": 2, "ep_size": 2}),
    ("ranks1", {}),
    ("ranks4", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    ("ranks4", {"fsdp_size": 4, "ep_size": 2}),
]


@pytest.mark.processes
@pytest.mark.nightly
def test_tensor_and_expert_parallelism_change_at_every_checkpoint(undisturbed, tmp_path: Path, request):
    for _, mesh in MESHES:
        skip_unless_loaded(mesh)
    folder = tmp_path / "model"
    MODELS["mixtral"]().save_pretrained(folder)
    legs = []
    for pool, mesh in MESHES:
        options = {"model": "mixtral", "file_bytes": 2**14} | ({"mesh": mesh, "folder": str(folder)} if mesh else {})
        legs.append((request.getfixturevalue(pool), options))
    travel(legs, undisturbed("mixtral"), tmp_path / "run")
    assert_loads(tmp_path / "run" / f"checkpoint-{STEPS}", undisturbed("mixtral"))
