"""Sharded training against one process: the same losses and gradient norms, whatever is sharded, adapted or offloaded.

The matrix has five dimensions. `--matrix` runs every combination (scripts/nightly.sh); by default as few as hold every pair of
values of two dimensions. Every run is under NCCL's order of operations (tests/worlds/fifo.py). Documents of 10 steps differ
enough that ranks run different numbers of micro-batches, some of them none in a step.
"""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.parallel.sharding import (
    USES_FSDP,
    even_placement,
    forget_trainers,
    fsdp_settings,
    name_layers,
    refuse_mixed_dtypes,
)
from hf_longctx.training.memory.capacity import memory_model
from tests.builders.tiny_models import tiny_llama
from tests.builders.training.sharded_runs import CAPACITY, LENGTHS, STEPS, assert_same, refused, run
from tests.builders.training_runs import (
    ANY_MODELS,
    MODELS,
    RecordingTrainer,
    Run,
    arguments,
    documents,
    fresh_accelerator_state,
)
from tests.builders.transformers_versions import SPREADS_MODELS, skip_unless_loaded
from tests.worlds.rank_pool import RankPool

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "sharding": ("ddp", "zero1", "zero2", "zero3"),
    "adapter": ("full", "lora"),
    "model": ("llama", "mixtral"),
    "checkpointing": (False, True),
    "offload": (0.0, 0.5, 1.0),
}
MESHES = [
    pytest.param("llama", {"fsdp_size": 2, "tp_size": 2}, marks=pytest.mark.nightly),
    pytest.param("mixtral", {"fsdp_size": 4, "ep_size": 2}, marks=pytest.mark.nightly),
    pytest.param("mixtral", {"fsdp_size": 2, "tp_size": 2}, marks=pytest.mark.nightly),
    ("mixtral", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    pytest.param("mixtral", {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, marks=pytest.mark.nightly),
    pytest.param("qwen3", {"fsdp_size": 2, "tp_size": 2}, marks=pytest.mark.nightly),
    pytest.param("gpt_oss", {"fsdp_size": 4, "ep_size": 2}, marks=pytest.mark.nightly),
    ("gemma2", {"fsdp_size": 2, "tp_size": 2}),  # its logits are more than its head's
    pytest.param("deepseek_v3", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, marks=pytest.mark.nightly),
]


def every_pair() -> Iterator[dict[str, Any]]:
    """Combinations in which any two values of different dimensions meet: the next one is that with most new pairs."""
    names = list(DIMENSIONS)
    combinations = [dict(zip(names, values)) for values in itertools.product(*DIMENSIONS.values())]

    def pairs(combination: dict[str, Any]) -> set[Any]:
        return {((a, combination[a]), (b, combination[b])) for a, b in itertools.combinations(names, 2)}

    missing = set().union(*(pairs(candidate) for candidate in combinations))
    while missing:
        best = max(combinations, key=lambda candidate: len(pairs(candidate) & missing))
        missing -= pairs(best)
        yield best


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The matrix on 2 ranks and on 4; the pairs on one of them, in turn."""
    if "combination" not in metafunc.fixturenames:
        return
    everything = [dict(zip(DIMENSIONS, values)) for values in itertools.product(*DIMENSIONS.values())]
    if metafunc.config.getoption("--matrix"):
        chosen = list(itertools.product(("ranks2", "ranks4"), everything))
    else:
        chosen = list(zip(itertools.cycle(("ranks2", "ranks4")), every_pair()))
    names = [f"{ranks}-{'-'.join(str(value) for value in by_name.values())}" for ranks, by_name in chosen]
    metafunc.parametrize(("ranks", "combination"), chosen, ids=names)


@pytest.fixture(scope="module")
def one_process(ranks1: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model, adapter) -> what one process saw, without sharding, checkpointing and offload."""
    seen: dict[tuple[str, str], Run] = {}

    def of(model: str, adapter: str = "full") -> Run:
        if (model, adapter) not in seen:
            output = str(tmp_path_factory.mktemp("one"))
            [seen[model, adapter]] = ranks1.run(
                run, output, model=model, adapter=adapter, in_order=False, evaluate=True
            )
        return seen[model, adapter]

    return of


def test_the_pairs_are_all_there():
    chosen = list(every_pair())
    assert len(chosen) < 20
    for first, second in itertools.combinations(DIMENSIONS, 2):
        met = {(candidate[first], candidate[second]) for candidate in chosen}
        assert met == set(itertools.product(DIMENSIONS[first], DIMENSIONS[second]))


@pytest.mark.processes
def test_the_same_run_as_in_one_process(ranks: str, combination, one_process, tmp_path: Path, request):
    pool: RankPool = request.getfixturevalue(ranks)
    expected = one_process(combination["model"], combination["adapter"])
    assert_same(pool.run(run, str(tmp_path), **combination), expected)


@pytest.mark.parametrize(("model", "mesh"), MESHES, ids=str)
def test_tensor_and_expert_parallelism(ranks4: RankPool, model: str, mesh, one_process, tmp_path: Path):
    skip_unless_loaded(mesh)
    folder = tmp_path / "model"
    ANY_MODELS[model]().save_pretrained(folder)
    sharding = "zero1" if mesh.get("ep_size") == 4 else "zero3"
    options = {"folder": str(folder), "mesh": mesh, "sharding": sharding, "evaluate": True}
    runs = ranks4.run(run, str(tmp_path), model=model, **options)
    expected = one_process(model)
    assert_same(runs, expected)
    for trained in runs:
        assert trained.evaluation["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=1e-4)


@pytest.mark.nightly
def test_tensor_parallelism_alone(ranks2: RankPool, one_process, tmp_path: Path):
    MODELS["llama"]().save_pretrained(tmp_path / "model")
    assert_same(
        ranks2.run(run, str(tmp_path), folder=str(tmp_path / "model"), mesh={"tp_size": 2}), one_process("llama")
    )


@pytest.mark.parametrize("sharding", [pytest.param("zero1", marks=pytest.mark.nightly), "zero3"])
@pytest.mark.parametrize(
    ("model", "mesh"),
    [pytest.param("llama", {"fsdp_size": 2}, marks=pytest.mark.nightly), ("mixtral", {"fsdp_size": 2, "ep_size": 2})],
)
def test_adapters_on_a_model_sharded_as_it_was_loaded(
    ranks2: RankPool, model: str, mesh: dict[str, int], sharding: str, one_process, tmp_path: Path
):
    """They are whole on every rank, and Trainer would average their gradients in the middle of a step."""
    skip_unless_loaded(mesh)
    MODELS[model]().save_pretrained(tmp_path / "model")
    options = {"folder": str(tmp_path / "model"), "mesh": mesh, "sharding": sharding, "adapter": "lora"}
    assert_same(ranks2.run(run, str(tmp_path), model=model, own_weights=True, **options), one_process(model, "lora"))


@pytest.mark.parametrize("launched", [False, True])
def test_a_trainer_that_shards_its_model_leaves_later_ones_whole_unless_a_launcher_asked(launched, monkeypatch):
    """accelerate asks all later trainers of a process, which were refused as FSDP1."""
    forget_trainers()
    monkeypatch.delenv(USES_FSDP, raising=False)
    if launched:
        monkeypatch.setenv(USES_FSDP, "true")
    args = SimpleNamespace(fsdp_plugin_args=None)
    assert fsdp_settings(args, "zero3") is not None
    monkeypatch.setenv(USES_FSDP, "true")  # as accelerate does
    assert fsdp_settings(args, "zero2") is not None
    assert fsdp_settings(args, "auto") is None
    assert (USES_FSDP in os.environ) == launched


@pytest.mark.skipif(SPREADS_MODELS, reason="this transformers' Trainer knows that the model is sharded")
def test_a_model_that_would_be_sharded_twice_is_refused(ranks2: RankPool, tmp_path: Path):
    MODELS["llama"]().save_pretrained(tmp_path / "model")
    for message in ranks2.run(refused, str(tmp_path), {"folder": str(tmp_path / "model"), "mesh": {"fsdp_size": 2}}):
        assert "the model was sharded when it was loaded (fsdp_size=2)" in message
        assert "valid: transformers>=5.19" in message


def test_key_value_heads_that_cannot_be_shared(ranks4: RankPool, tmp_path: Path):
    MODELS["llama"]().save_pretrained(tmp_path / "model")
    settings = {"folder": str(tmp_path / "model"), "mesh": {"tp_size": 4}}
    for message in ranks4.run(refused, str(tmp_path), settings):
        assert "tensor parallelism of 4 splits 2 key-value heads unevenly (2 = 0 * 4 + 2)" in message


@pytest.mark.parametrize(
    "sharding", [*(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("zero1", "zero2")), "zero3"]
)
def test_evaluation_and_a_checkpoint_that_transformers_loads(ranks2: RankPool, sharding: str, one_process, tmp_path):
    options = {"sharding": sharding, "evaluate": True, "save_strategy": "steps", "save_steps": STEPS, "in_order": False}
    runs = ranks2.run(run, str(tmp_path), model="mixtral", **options)
    expected = one_process("mixtral")
    assert_same(runs, expected)
    for trained in runs:
        assert trained.evaluation["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}").state_dict()
    assert saved.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-4)


def test_weights_are_placed_where_ranks_hold_no_rows_of_nothing():
    placed = even_placement(64)
    experts = torch.nn.Parameter(torch.empty(8, 28672, 4096, device="meta"))
    assert placed(experts) == Shard(1)
    assert placed(torch.nn.Parameter(torch.empty(8, 4096, 14336, device="meta"))) == Shard(2)
    for shape in (
        (4096, 4096),
        (32000, 4096),
        (104, 64),
        (8,),
        (8, 31),
        (),
    ):  # many rows, or nothing that divides evenly
        assert placed(torch.nn.Parameter(torch.empty(shape, device="meta"))) is None, shape
    assert placed(torch.nn.Parameter(torch.empty(65, 128, device="meta"))) == Shard(1)


class ExpertsOnAllRanks(TrainerCallback):
    """Refuses training unless each rank holds a part of every expert."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        stacked = [weight for name, weight in model.named_parameters() if ".experts." in name and weight.ndim == 3]
        assert stacked
        for weight in stacked:
            assert weight.to_local().shape[0] == weight.shape[0] > 1, (weight.shape, weight.placements)


def test_fewer_experts_than_ranks_are_spread_evenly(
    ranks4: RankPool, ranks1: RankPool, ranks2: RankPool, tmp_path: Path
):
    """Ranks without an expert would gather and reduce as if each had one."""
    options: dict[str, Any] = {"model": "mixtral", "build": {"num_local_experts": 2, "num_experts_per_tok": 1}}
    [expected] = ranks1.run(run, str(tmp_path / "one"), in_order=False, **options)
    saving = {"save_strategy": "steps", "save_steps": 1, "in_order": False}
    runs = ranks4.run(
        run, str(tmp_path / "four"), sharding="zero3", callbacks=[ExpertsOnAllRanks()], **saving, **options
    )
    assert_same(runs, expected)
    first = tmp_path / "four" / "checkpoint-1"
    resumed = ranks2.run(run, str(tmp_path / "two"), sharding="zero1", resume=str(first), in_order=False, **options)
    assert resumed[0].series("loss")[-1] == pytest.approx(expected.series("loss")[-1], rel=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "four" / f"checkpoint-{STEPS}").state_dict()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-4)


def test_trained_rows_of_embeddings_that_the_head_shares(ranks1: RankPool, ranks2: RankPool, tmp_path: Path):
    # accelerate takes these for untied, and FSDP2 would hold them twice.
    options = {"adapter": "tokens", "build": {"tie_word_embeddings": True}, "steps": 3}
    [expected] = ranks1.run(run, str(tmp_path), in_order=False, **options)
    assert_same(ranks2.run(run, str(tmp_path), sharding="zero3", **options), expected)


@pytest.mark.parametrize(
    "sharding", [*(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("zero1", "zero2")), "zero3"]
)
def test_ranks_without_a_document(ranks4: RankPool, sharding: str, ranks1: RankPool, tmp_path: Path):
    options: dict[str, Any] = {"lengths": [9, 20, 150, 12, 7, 31, 2, 5], "steps": 2, "model": "mixtral"}
    [expected] = ranks1.run(run, str(tmp_path), in_order=False, **options)
    assert_same(ranks4.run(run, str(tmp_path), sharding=sharding, **options), expected)


def test_bfloat16_is_the_same_in_every_mode(ranks2: RankPool, tmp_path: Path):
    """Weights of both are rounded alike, sums over ranks are in float32: bfloat16 moves a loss by 4e-3."""
    runs = {
        sharding: ranks2.run(run, str(tmp_path), sharding=sharding, bf16=True, steps=4)[0]
        for sharding in ("zero1", "zero2", "zero3")
    }
    [whole] = ranks2.run(run, str(tmp_path), sharding="ddp", bf16=True, steps=4)[:1]
    for sharding, sharded in runs.items():
        assert sharded.series("loss") == pytest.approx(whole.series("loss"), rel=1e-2), sharding
        assert sharded.series("grad_norm") == pytest.approx(whole.series("grad_norm"), rel=5e-2), sharding


@pytest.mark.parametrize("settings", [{"sharding": kind} for kind in ("ddp", "zero1", "zero3")], ids=str)
def test_all_ranks_begin_with_the_weights_of_rank_0(ranks2: RankPool, one_process, tmp_path: Path, settings):
    assert_same(ranks2.run(run, str(tmp_path), own_weights=True, **settings), one_process("llama"))


def test_accelerate_s_own_settings_are_taken(ranks2: RankPool, one_process, tmp_path: Path):
    for config in ({"reshard_after_forward": True}, {"reshard_after_forward": False}, {"cpu_offload": True}):
        assert_same(ranks2.run(run, str(tmp_path), fsdp=True, fsdp_config=config), one_process("llama"))


@pytest.mark.parametrize("sharding", [pytest.param("zero1", marks=pytest.mark.nightly), "zero3"])
def test_parts_in_host_memory_train_the_same(ranks2: RankPool, one_process, tmp_path: Path, sharding: str):
    runs = ranks2.run(run, str(tmp_path), sharding=sharding, plugin={"host_offload": True})
    assert_same(runs, one_process("llama"))


def test_settings_that_contradict_each_other(ranks2: RankPool, tmp_path: Path):
    for settings, rule in (
        (
            {"sharding": "ddp", "fsdp": True},
            "accelerate's configuration sets FSDP. Valid: zero1, zero2, zero3, or auto",
        ),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp_config.version=1: FSDP1 hangs"),
    ):
        for message in ranks2.run(refused, str(tmp_path), settings):
            assert rule in message


class LaunchedTrainer(RecordingTrainer):
    """One under an environment as `accelerate launch` exports it for FSDP."""

    environment: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.environ.update({"ACCELERATE_USE_FSDP": "true"} | self.environment)
        super().__init__(*args, **kwargs)


class OfVersion1(LaunchedTrainer):
    environment: ClassVar = {"FSDP_VERSION": "1"}


class OfSizes(LaunchedTrainer):
    environment: ClassVar = {
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "2000",
    }


@pytest.mark.parametrize(
    ("launched", "sharding", "rule"),
    [
        (OfVersion1, "auto", "FSDP1 hangs when ranks run different micro-batches. Valid: fsdp_version 2"),
        (OfVersion1, "zero3", "FSDP1 hangs when ranks run different micro-batches. Valid: fsdp_version 2"),
        (OfSizes, "auto", "SIZE_BASED_WRAP .parts of 2000 weights. .* Valid: TRANSFORMER_BASED_WRAP, or NO_WRAP"),
    ],
)
def test_what_a_launcher_asks_of_fsdp_and_cannot_be_honoured(
    ranks2: RankPool, tmp_path: Path, launched, sharding, rule
):
    for message in ranks2.run(refused, str(tmp_path), {"sharding": sharding, "trainer_class": launched}):
        assert re.search(rule, message)


def test_weights_of_several_dtypes_in_a_part_are_refused_by_name(ranks2: RankPool, tmp_path: Path):
    settings = {"sharding": "zero3", "wider": ("norm",)}
    for message in ranks2.run(refused, str(tmp_path), settings):
        assert re.search(
            r"several dtypes \(.*proj\.weight in float32, .*norm.* in float64\).* Valid: bf16=True", message
        )
    layer, rest = [MODELS["llama"]() for _ in range(2)]
    by_layer, whole = (
        FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy=policy, transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
        )
        for policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP")
    )
    for model, parts in ((layer, [layer.model.layers[1]]), (rest, [*rest.children(), rest.model.layers])):
        for part in parts:  # whole parts, each in one dtype
            part.double() if part is not rest.model.layers else part.float()
        refuse_mixed_dtypes(model, by_layer)
        with pytest.raises(ValueError, match="several dtypes"):
            refuse_mixed_dtypes(model, whole)


def every_way_to_a_model(output: str, sharding: str, parts: str) -> dict[str, Any]:
    """Return, of a model that a function makes: losses before, in and after training, what memory is counted, what is saved."""
    fresh_accelerator_state()
    rows = Dataset.from_list(documents(LENGTHS[:8]))
    settings: dict[str, Any] = {"max_steps": 2, "fsdp": True, "fsdp_config": {"state_dict_type": parts}}
    trainer = LongContextTrainer(
        model_init=lambda: tiny_llama(tie_word_embeddings=True),
        args=arguments(output, **settings if sharding != "ddp" else {"max_steps": 2}),
        train_dataset=rows,
        eval_dataset=rows,
        plugin=LongContextPlugin(capacity=CAPACITY, global_batch_documents=4, sharding=sharding),
    )
    memory = memory_model(trainer.plugin, trainer.model, trainer.args, trainer.world)
    losses = [trainer.evaluate()["eval_loss"]]
    for _ in range(2):  # the second time from a new model
        trainer.train()
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append(trainer.evaluate()["eval_loss"])
    trainer.save_model(output)
    return {"losses": losses, "memory": memory}


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [pytest.param("zero1", "FULL_STATE_DICT", marks=pytest.mark.nightly), ("zero3", "SHARDED_STATE_DICT")],
)
def test_a_model_from_a_function_is_evaluated_trained_and_saved(
    ranks2: RankPool, sharding: str, parts: str, tmp_path: Path
):
    [whole, _] = ranks2.run(every_way_to_a_model, str(tmp_path / "ddp"), "ddp", parts)
    for answer in ranks2.run(every_way_to_a_model, str(tmp_path / sharding), sharding, parts):
        assert answer["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        assert 0 < answer["memory"].optimizer <= 0.51 * whole["memory"].optimizer
        assert answer["memory"].host == 0
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "ddp").state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / sharding).state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-4)
    names, other_names = (load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("ddp", sharding))
    assert names == other_names, "tied weights have one name in both"


def test_layers_that_a_text_model_comes_without_are_not_looked_for():
    """A multimodal family's text model lists the layers of its towers too; accelerate refuses a name that it does not find."""
    model = MODELS["llama"]()
    model._no_split_modules = {"LlamaDecoderLayer", "LlamaVisionBlock"}
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    name_layers(model, fsdp)
    wraps = fsdp2_prepare_auto_wrap_policy(fsdp, model)
    assert [type(part).__name__ for part in model.modules() if wraps(part)] == ["LlamaDecoderLayer"] * 2
