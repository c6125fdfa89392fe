"""Models of which a process has some layers: how they are spread, what is said of them, and what a pipeline refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, VeraConfig, get_peft_model
from transformers.distributed import DistributedConfig, mixin

from hf_longctx import LongContextPlugin, LongContextTrainer, from_pretrained
from hf_longctx.certified_patch import patch_model
from hf_longctx.checkpoint.checkpoints import _saved_weights
from hf_longctx.models.stages import cut_model, cut_of, loading_stages, refuse_other_cut, whole_parameters
from hf_longctx.planner import Topology
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.planner.stages.stage_layers import (
    describe_stages,
    fullest_share,
    most_in_flight,
    stage_layers,
    stage_weights,
)
from hf_longctx.training.arguments import refuse
from hf_longctx.training.measuring.measurements import StepFlops
from hf_longctx.training.measuring.step_costs import cost_model
from hf_longctx.training.request import Request
from hf_longctx.training.steps.staged import activation_dtype
from tests.builders.tiny_models import tiny_bloom, tiny_llama
from tests.builders.training.pipeline_runs import FOUR, GPIPE, INTERLEAVED, TIED, run
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state
from tests.builders.transformers_versions import SPREADS_MODELS, TRANSFORMERS, skip_unless_loaded
from tests.worlds.launched import torchrun
from tests.worlds.rank_pool import RankPool


def test_layers_are_spread_by_cost():
    config = tiny_llama(num_hidden_layers=8, vocab_size=128).config
    assert stage_layers(config, 1, 1024) == [range(8)]
    assert [len(numbers) for numbers in stage_layers(config, 4, 4096)] == [2, 2, 2, 2]
    config.vocab_size = 128_000  # a head worth many layers
    layers = stage_layers(config, 4, 128)
    assert [number for numbers in layers for number in numbers] == list(range(8))
    assert len(layers[-1]) == 1
    weights = stage_weights(config, layers, 128)
    assert sum(weights) == pytest.approx(4000, abs=3)
    assert max(weights) == weights[-1]
    with pytest.raises(ValueError, match=r"9 stages of 8 layers: every stage needs a layer. Valid: 1 to 8 stages"):
        stage_layers(config, 9, 128)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (3, 1), (2, 2)])
def test_the_fullest_stage_is_that_of_cut_models(stages: int, virtual: int, tied: bool):
    config = tiny_llama(num_hidden_layers=5, vocab_size=600, tie_word_embeddings=tied).config
    spread = stage_layers(config, stages * virtual, 512)
    sizes = []
    for device in range(stages):
        model = patch_model(tiny_llama(num_hidden_layers=5, vocab_size=600, tie_word_embeddings=tied))
        total = sum(parameter.numel() for parameter in model.parameters())
        cut_model(model, spread, range(device, stages * virtual, stages))
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    # That of the last norm is left out.
    assert fullest_share(config, stages, virtual, 512) == pytest.approx(max(sizes) / total, rel=1e-2)
    assert fullest_share(config, 1) == 1


def test_the_first_device_keeps_more_than_all_layers_of_a_micro_batch():
    """It has more layers than others, since the last one has the head too, and as many micro-batches as there are stages."""
    config = tiny_llama(num_hidden_layers=8, vocab_size=3000).config
    assert [len(stage) for stage in stage_layers(config, 4, 512)] == [3, 2, 2, 1]
    assert most_in_flight(config, 4, 1, 512) == (4, 4 * 3, 3)
    assert most_in_flight(config, 2, 2, 512) == (3, 13, 3)  # 5 halves of 3 + 2 layers on the first device
    assert most_in_flight(config, 1) == (1, 0, 0)
    whole = MemoryModel.from_config(config, checkpointing=True)
    device = whole.in_stages(1.0, 4, 12, 3)
    assert device.token == 4 * whole.base_token + 12 * (whole.checkpoint_token + whole.keys_token)
    assert whole.token == whole.base_token + 8 * whole.checkpoint_token


def test_a_cut_model_has_its_stages_alone():
    model = patch_model(tiny_llama(**TIED))
    whole = set(model.state_dict())
    cut_model(model, [range(1), range(1, 3), range(3, 4)], [1])
    cut = cut_of(model)
    assert cut is not None
    names = set(model.state_dict())
    assert names
    assert all(".1." in name or ".2." in name for name in names)
    assert names | cut.elsewhere.keys() == whole - {"lm_head.weight"}
    assert all(parameter.is_meta for parameter in cut.elsewhere.values())
    every = whole_parameters(model)
    assert list(every) == sorted(whole - {"lm_head.weight"})
    assert sum(parameter.numel() for parameter in every.values()) == tiny_llama(**TIED).num_parameters()
    with pytest.raises(RuntimeError, match="embed_tokens lies on another stage of the pipeline"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(IndexError, match="layer 0 lies on another stage of the pipeline"):
        model.model.layers[0]
    with pytest.raises(AttributeError, match=r"lm_head.weight lies on another stage of the pipeline"):
        _ = model.lm_head.weight
    with pytest.raises(RuntimeError, match=r"would save a part as if it were the model. Valid: trainer.save_model"):
        model.save_pretrained("unused")
    with pytest.raises(ValueError, match=r"stages are known of Llama, Mistral, Mixtral. Valid: pipeline_stages=1"):
        cut_model(patch_model(tiny_bloom()), [range(1), range(1, 2)], [0])


def test_the_last_stage_of_tied_embeddings_is_no_model():
    """It has embeddings, layers and a head, and would give logits."""
    model = patch_model(tiny_llama(**TIED))
    cut_model(model, [range(3), range(3, 4)], [1])
    with pytest.raises(RuntimeError, match="a part of the layers lies on another stage of the pipeline"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_a_model_that_was_cut_keeps_its_stages():
    model = patch_model(tiny_llama(**FOUR))
    refuse_other_cut(model, 1, [0])
    cut_model(model, [range(2), range(2, 4)], [0])
    refuse_other_cut(model, 2, [0])
    for stages, own in ((1, [0]), (4, [0]), (4, [0, 2])):
        with pytest.raises(ValueError, match=rf"was cut into 2 stages before, .* has \[0\]; this run has {stages}"):
            refuse_other_cut(model, stages, own)


def counted(stages: int) -> tuple[int, int, int, int]:
    """Return what a trainer of adapters says of its model: weights, FLOPs of a token, and what an optimizer step takes."""
    fresh_accelerator_state()
    adapted = get_peft_model(tiny_llama(**TIED), LoraConfig(r=4, target_modules=["v_proj"], layers_to_transform=[0]))
    plugin = LongContextPlugin(capacity=64, pipeline_stages=stages)
    trainer = LongContextTrainer(adapted, arguments("unused"), train_dataset=documents([40, 12]), plugin=plugin)
    model, weights = trainer.model, list(trainer.whole_parameters().values())
    cost = cost_model(plugin, model, Topology(1, 64, stages=stages), torch.device("cpu"))
    trained = sum(parameter.numel() for parameter in weights if parameter.requires_grad)
    return sum(parameter.numel() for parameter in weights), trained, StepFlops(model).linear, cost.step_ns


def test_what_is_said_of_a_model_counts_all_stages(ranks1: RankPool, ranks2: RankPool):
    """On every rank: plans of remote loaders are compared with all that they depend on."""
    [whole] = ranks1.run(counted, 1)
    assert ranks2.run(counted, 2) == [whole, whole]


def test_costs_of_a_model_without_memory_are_the_same():
    # Of a dry run's: nothing of it lies elsewhere.
    plugin, topology = LongContextPlugin(capacity=64), Topology(2, 64)
    in_memory, meta = (
        cost_model(plugin, tiny_llama().to(device), topology, torch.device("cpu")) for device in ("cpu", "meta")
    )
    assert in_memory.step_ns > 0
    assert meta == in_memory


def test_activations_have_one_dtype_whatever_is_quantised():
    dtypes = []
    for stage in range(2):
        model = patch_model(tiny_llama(**FOUR).to(torch.bfloat16))
        cut_model(model, [range(2), range(2, 4)], [stage])
        for name, weight in list(model.named_parameters()):
            if name.endswith("_proj.weight"):  # in 4 bits, with an adapter in float32
                module = model.get_submodule(name.removesuffix(".weight"))
                module.weight = torch.nn.Parameter(weight.to(torch.uint8), requires_grad=False)
                module.lora_A = torch.nn.Linear(weight.shape[1], 4)
        dtypes.append(activation_dtype(model))
    assert dtypes == [torch.bfloat16, torch.bfloat16]


def test_stages_are_described_by_layers_and_cost():
    config = tiny_llama(num_hidden_layers=6).config
    weights = stage_weights(config, layers := [range(4), range(4, 6)], 64)
    parts = " + ".join(f"{weight / 10:.0f} %" for weight in weights)
    assert describe_stages(config, layers, 64) == f"layers 4 + 2, which cost {parts} of a stage's mean"


def refused(options: dict[str, Any]) -> str:
    try:
        run("unused", **options)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 3}, "the 2 processes (2 = 0 * 3 + 2); valid: [1, 2], or a multiple of 3 processes"),
        ({"stages": 2, "sharding": "zero3"}, "valid: sharding ddp or zero1"),
        ({"stages": 2, "plugin": GPIPE | {"capacity": 0}}, "capacity=0 counts what 1f1b holds at a time"),
        (
            {"stages": 2, "plugin": {"pipeline_schedule": "best"}},
            "pipeline_schedule: must be '1f1b', 'gpipe' or 'interl",
        ),
        ({"stages": 2, "plugin": {"virtual_stages": 2}}, "interleaved takes 2 or more, the others 1"),
        ({"stages": 2, "plugin": {"virtual_stages": 3, "pipeline_schedule": "interleaved"}}, "6 stages of 4 layers"),
        ({"stages": 1, "plugin": INTERLEAVED}, "virtual_stages: 2 with pipeline_stages (1): there is no pipeline"),
        ({"stages": 2, "model": "bloom", "build": {}}, "BloomModel: stages are known of Llama, Mistral, Mixtral"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(ranks2: RankPool, options: dict[str, Any], message: str):
    assert message in ranks2.run(refused, options)[0]


def test_half_precision_that_a_launcher_chose_is_refused(monkeypatch: pytest.MonkeyPatch):
    """accelerate launch --mixed_precision fp16: TrainingArguments.fp16 stays False."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    plugin = LongContextPlugin(capacity=64, pipeline_stages=2)
    with pytest.raises(ValueError, match=r"pipeline_stages=2: fp16 scales gradients .* valid: bf16"):
        refuse(Request(arguments("unused"), plugin, tiny_llama(), 2, "ddp"))


def refused_model(folder: str, mesh: dict[str, int], adapters: bool = False, optimizer: bool = False) -> str:
    """Return what is said of a model that is loaded in stages, or where there is no mesh, whole."""
    fresh_accelerator_state()
    try:
        model = from_pretrained(folder, **({"distributed_config": DistributedConfig(**mesh)} if mesh else {}))
        if adapters:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        given: dict[str, Any] = {"optimizers": (torch.optim.AdamW(model.parameters()), None)} if optimizer else {}
        plugin = LongContextPlugin(capacity=64, pipeline_stages=2)
        LongContextTrainer(model, arguments("unused"), train_dataset=documents([40, 12]), plugin=plugin, **given)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (tiny_llama(**FOUR), {"mesh": {"pp_size": 2}, "adapters": True}, "valid: adapters on a model that is whole"),
        (tiny_llama(**FOUR), {"mesh": {"pp_size": 3}}, "must divide the 4 processes (4 = 1 * 3 + 1); valid: [1, 2, 4]"),
        (tiny_bloom(), {"mesh": {"pp_size": 2}}, "BloomModel: stages are known of Llama, Mistral, Mixtral"),
        (
            tiny_llama(**FOUR),
            {"mesh": {}, "optimizer": True},
            "optimizers=(AdamW, ...) was made of the whole model's weights",
        ),
    ],
)
def test_what_is_loaded_in_stages_is_refused(
    ranks4: RankPool, tmp_path: Path, model: Any, options: dict[str, Any], message: str
):
    model.save_pretrained(tmp_path)
    expected = message if SPREADS_MODELS or not options["mesh"] else "valid: transformers>=5.19, or a whole model"
    for text in ranks4.run(refused_model, str(tmp_path), **options):
        assert expected in text


def test_stages_are_loaded_before_processes_have_met(monkeypatch: pytest.MonkeyPatch):
    """A script loads its model before its TrainingArguments: only the launcher knows then how many processes there are."""
    if not SPREADS_MODELS:
        with loading_stages() as loads:
            assert not loads
        return
    made: list[tuple[int, int, int]] = []

    def make_mesh(settings: DistributedConfig) -> None:
        replicas = settings.dp_replicate_size if TRANSFORMERS >= (5, 23) else settings.fsdp_size
        made.append((settings.pp_size, replicas, settings.tp_size))

    monkeypatch.setattr(mixin, "initialize_distributed_mesh", make_mesh)
    monkeypatch.setenv("WORLD_SIZE", "12")
    with loading_stages():
        mixin.initialize_distributed_mesh(DistributedConfig(pp_size=2, tp_size=2))
    assert made == [(2, 3, 2)]


@pytest.mark.processes
@pytest.mark.nightly
def test_stages_are_loaded_before_there_is_a_process_group(tmp_path: Path):
    """The same with a launcher: transformers makes the group, and four processes are two stages of two."""
    skip_unless_loaded({"pp_size": 2})
    tiny_llama(**FOUR).save_pretrained(tmp_path)
    ended = torchrun("tests/models/loaded_stage.py", tmp_path, ranks=4)
    assert ended.code == 0, ended.output
    # Progress bars of other ranks may share a line with it.
    assert sorted(re.findall(r"rank \d has layers ([\d, ]+);", ended.output)) == ["0, 1", "0, 1", "2, 3", "2, 3"]


def test_stages_save_what_their_layers_share_under_one_name():
    """VeRA's projections are buffers that all layers have."""

    def saved(own: list[int]) -> set[str]:
        model = get_peft_model(patch_model(tiny_llama()), VeraConfig(r=4, target_modules=["o_proj"]))
        cut_model(model, [range(1), range(1, 2)], own)
        return set(_saved_weights(model))

    whole = _saved_weights(get_peft_model(tiny_llama(), VeraConfig(r=4, target_modules=["o_proj"])))
    assert saved([0]) == saved([1]) == set(whole)
