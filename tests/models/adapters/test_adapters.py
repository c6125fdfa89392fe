"""LoRA and frozen weights: what is trained, what is saved, and that two ranks train it as one process does."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    TinyLoraConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_longctx.certified_patch import patch_model
from hf_longctx.checkpoint.folder import CheckpointError
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.models.adapters.peft_adapters import add_lora, four_bit_weights, freeze, refuse_row_adapters
from hf_longctx.models.attention import is_patched
from hf_longctx.planner import GlobalBatches
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.refusals import problems
from hf_longctx.training.request import Request, stated
from tests.builders.tiny_models import tiny_general, tiny_llama, tiny_mixtral
from tests.builders.training_runs import ANY_MODELS, MODELS, Rows, Run, arguments, documents, reference, train
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]
PLUGIN = {"capacity": 120, "global_batch_documents": 6}
EPOCHS = 2
TOLERANCE = 1e-4
"""float32: sums over tokens in another order, through 4 steps of Adam."""
FIRST_LAYERS = ["model.embed_tokens", "model.layers.0"]
ALL_BUT_HEAD = ["model.*"]
PEFTS_OWN = ["all-linear as PEFT understands it: of Mixtral, experts too"]


def tied() -> Any:
    return tiny_llama(tie_word_embeddings=True)


def with_adapters(model: Any, add: Callable[[Any], Any]) -> Any:
    """Adapters with the same random numbers on every rank, and B, which PEFT begins at zero, away from it."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = add(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name and not parameter.any():
                    parameter.normal_(std=0.05)
    return model


def prepared(model: str, patterns: list[str] | dict[str, Any] | None) -> Any:
    """A tiny model with adapters, of these settings where they are some, or with frozen parameters where patterns say so."""
    made = tied() if model == "tied" else ANY_MODELS[model]()
    if patterns is None or isinstance(patterns, dict):
        return with_adapters(made, partial(add_lora, r=4, alpha=8.0, **(patterns or {})))
    if patterns == PEFTS_OWN:
        return with_adapters(made, lambda model: get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")))
    freeze(made, patterns)
    return made


def trained(model: str, patterns: list[str] | dict[str, Any] | None, rows: Rows, settings: dict[str, Any]) -> Run:
    """Runs in a rank, whose communicators keep NCCL's order."""
    return train(prepared(model, patterns), rows, PLUGIN, settings, in_order=True)


CASES: dict[str, tuple[str, list[str] | dict[str, Any] | None, dict[str, Any]]] = {
    "lora": ("qwen3", None, {}),
    "lora, checkpointing": ("llama", None, {"gradient_checkpointing": True}),
    "lora beside sinks and experts, checkpointing": ("gpt_oss", None, {"gradient_checkpointing": True}),
    "lora on Mixtral's attention": ("mixtral", None, {}),
    "PEFT's adapters on Mixtral's experts": ("mixtral", PEFTS_OWN, {}),
    "first layers frozen": ("llama", FIRST_LAYERS, {}),
    "embeddings frozen, checkpointing": ("llama", ["model.embed_tokens"], {"gradient_checkpointing": True}),
    "only the head trained": ("llama", ALL_BUT_HEAD, {}),
    "embeddings and head beside adapters": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}, {}),
    "some tokens' embeddings, tied to the head": ("tied", {"trainable_token_indices": [3, 5, 90]}, {}),
    "adapters on the head too, DoRA and rsLoRA": (
        "llama",
        {"target_modules": ["q_proj", "up_proj", "lm_head"], "use_dora": True, "use_rslora": True},
        {"gradient_checkpointing": True},
    ),
    "PiSSA, ranks by module": ("llama", {"init_lora_weights": "pissa", "rank_pattern": {"q_proj": 2}}, {}),
    "OLoRA": ("llama", {"init_lora_weights": "olora"}, {}),
    "orthogonal": ("llama", {"init_lora_weights": "orthogonal"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_plain_transformers_does(ranks2: RankPool, monkeypatch, tmp_path: Path, case: str):
    name, patterns, settings = CASES[case]
    rows, settings = documents(LENGTHS), {"output_dir": str(tmp_path), "num_train_epochs": EPOCHS, **settings}
    monkeypatch.setitem(MODELS, case, lambda: prepared(name, patterns))
    batches = GlobalBatches(np.array(LENGTHS), arguments(**settings).seed, documents=PLUGIN["global_batch_documents"])
    losses, norms, weights = reference(case, rows, batches, EPOCHS, settings)
    assert len(losses) == 4
    before = prepared(name, patterns)
    learns = {key for key, parameter in before.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for run in ranks2.run(trained, name, patterns, rows, settings):
        assert sum(run.series("split_documents")) > 0
        assert run.series("loss") == pytest.approx(losses, rel=TOLERANCE)
        assert run.series("grad_norm") == pytest.approx(norms, rel=TOLERANCE)
        for key, weight in before.state_dict().items():
            changed = not torch.equal(run.weights[key], weight)
            assert changed == (key in learns), f"{key} {'changed' if changed else 'did not change'}"
            torch.testing.assert_close(run.weights[key], weights[key], rtol=0, atol=TOLERANCE)


def test_only_adapters_are_saved_plain_peft_loads_them_and_training_resumes(tmp_path: Path):
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    rows, plugin = documents(LENGTHS), {"capacity": 200, "global_batch_documents": 6}
    settings = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    whole = train(prepared("llama", None), rows, plugin, settings)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert sorted(saved) == sorted(name.replace(".default", "") for name in whole.weights if "lora_" in name)
    assert not list(checkpoint.glob("model*"))

    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), checkpoint)
    ours = prepared("llama", None)
    ours.load_state_dict(whole.weights)
    ids = torch.arange(50)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(plain(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-2)

    half = str(tmp_path / "run" / "checkpoint-2")
    resumed = train(prepared("llama", None), rows, plugin, settings, resume=half)
    assert resumed.series("loss") == whole.series("loss")
    for name, weight in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    "config",
    [VeraConfig(r=4), VBLoRAConfig(r=4, num_vectors=16, vector_length=8, topk=2), TinyLoraConfig(r=2)],
    ids=["buffers", "a shared weight", "both"],
)
def test_checkpoints_hold_what_methods_share_among_layers_or_keep_in_buffers(config: Any, tmp_path: Path):
    def adapted(seed: int) -> Any:
        torch.manual_seed(seed)
        return get_peft_model(tiny_llama(), type(config)(**config.to_dict() | {"target_modules": ["o_proj"]}))

    settings = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 2,
        "learning_rate": 0.1,
    }
    rows, plugin, trained = documents(LENGTHS), {"capacity": 200, "global_batch_documents": 6}, adapted(5)
    train(trained, rows, plugin, settings)
    ids = torch.arange(50)[None]
    plain = PeftModel.from_pretrained(tiny_llama(), tmp_path / "checkpoint-2").eval()
    resumed = adapted(6)  # with other buffers, where they are drawn
    train(resumed, rows, plugin, settings | {"save_strategy": "no"}, resume=str(tmp_path / "checkpoint-1"))
    with torch.no_grad():
        expected = trained.eval()(input_ids=ids).logits
        for model in (plain, resumed.eval()):
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(tiny_llama()(input_ids=ids).logits, expected, atol=1e-2)


class InMainThread:
    """A hook of a module's state as FSDP2 has one, which puts weights in parts: training must not be under way."""

    def __call__(self, *_: Any) -> None:
        assert threading.current_thread() is threading.main_thread()


def test_what_peft_asks_for_is_saved_beside_training(tmp_path: Path):
    """Trained copies of tied embeddings under both names."""
    model = add_lora(tied(), r=4, modules_to_save=["embed_tokens"])
    for module in model.modules():
        module.register_state_dict_pre_hook(InMainThread())
    settings = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    run = train(model, documents(LENGTHS), {"capacity": 200}, settings)
    assert not [text for text in run.messages if "could not be written" in text]
    plain, ids = PeftModel.from_pretrained(tied(), tmp_path / "checkpoint-2"), torch.arange(50)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_adapters_that_peft_cannot_save_are_refused_before_the_first_step(monkeypatch, tmp_path: Path):
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("modules_to_save")

    monkeypatch.setattr("peft.get_peft_model_state_dict", fail)
    settings = {"output_dir": str(tmp_path), "save_strategy": "steps", "max_steps": 2}
    with pytest.raises(CheckpointError, match="no checkpoint of this run could be saved: KeyError: 'modules_to_save'"):
        train(add_lora(tiny_llama(), r=2), documents(LENGTHS), {"capacity": 200}, settings)


def test_adapters_of_half_precision_weights_are_float32_and_leave_head_and_experts_alone():
    for model in (tiny_llama(torch.bfloat16), tiny_mixtral(torch.bfloat16)):
        learns = {name: weight for name, weight in add_lora(model).named_parameters() if weight.requires_grad}
        assert {weight.dtype for weight in learns.values()} == {torch.float32}
        ends = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in learns}
        attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert ends == attention | (
            {"gate_proj", "up_proj", "down_proj"} if model.config.model_type == "llama" else set()
        )


def test_patterns_name_parameters_or_modules(tmp_path: Path):
    model = tiny_llama()
    assert freeze(model, ["model.layers.[01].mlp.up_proj", "*norm*"]) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        *(name for name, _ in model.named_parameters() if "norm" in name),
    ]
    tied = tiny_llama(tie_word_embeddings=True)
    freeze(tied, ["lm_head"])
    assert not tied.model.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda model: freeze(model, ["model.embed_token"]),
            r"'model.embed_token' matches no parameter .* model.embed_tokens",
        ),
        (lambda model: freeze(model, ["*"]), "leaves nothing to train: all 21 parameters match"),
        (lambda model: add_lora(model, target_modules=["q_prj"]), "'q_prj' matches no module of the model; .* q_proj"),
        (
            lambda model: add_lora(model, modules_to_save=["lm_haed"]),
            "'lm_haed' matches no module of the model; .* lm_head",
        ),
        (
            lambda model: add_lora(model, trainable_token_indices=[3, 10**6]),
            r"\[1000000\] are no rows of the embeddings, which have \d+; valid: 0 to",
        ),
        (
            lambda model: add_lora(model, trainable_token_indices={"embed_tokens": [-1]}),
            r"\[-1\] are no rows of embed_tokens, which have",
        ),
        (lambda model: add_lora(model, trainable_token_indices={"embed": [1]}), "'embed' matches no module"),
        (lambda model: add_lora(model, eva_config={}), "eva_config begins from activations or gradients of data"),
        (lambda model: add_lora(model, target_modules="q_proj"), "must be 'all-linear' or a list"),
    ],
)
def test_what_matches_nothing_or_too_much_is_refused(wrong: Callable[[Any], Any], message: str):
    model = tiny_llama()
    with pytest.raises(ValueError, match=message):
        wrong(model)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


TOKENS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PromptTuningConfig(**TOKENS), "PROMPT_TUNING. puts virtual tokens"),
        (PrefixTuningConfig(**TOKENS), "PREFIX_TUNING. puts virtual tokens"),
        (AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1), "ADAPTION_PROMPT. looks at"),
        (LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2]), "LORA. with alora_invocation_tokens"),
    ],
    ids=lambda value: getattr(value, "peft_type", ""),
)
def test_adapters_that_look_at_a_row_of_tokens_are_refused(config: Any, reason: str):
    with pytest.raises(ValueError, match=f"{reason}.* Valid: methods that act on each token alone"):
        patch_model(get_peft_model(tiny_llama(), config))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "LILY"}, "LILY. looks at a whole row"),
        ({"peft_type": "PVERA"}, "PVERA. draws at random for a whole row"),
        ({"peft_type": "ADALORA"}, "ADALORA. adds a term to the loss of every call"),
        ({"peft_type": "LORA", "velora_config": {"rank": 1}}, "LORA. with velora_config draws or compresses"),
    ],
    ids=lambda value: value["peft_type"] if isinstance(value, dict) else "",
)
def test_adapters_whose_result_depends_on_how_documents_are_spread_are_refused(settings: dict[str, Any], reason: str):
    """Some of these are not in every version of PEFT."""
    model = SimpleNamespace(peft_config={"default": SimpleNamespace(is_prompt_learning=False, **settings)})
    with pytest.raises(ValueError, match=f"{reason}.* Valid: methods that act on each token alone"):
        refuse_row_adapters(model)


def test_an_adapter_on_the_head_of_a_patched_model_is_refused_by_its_loss():
    """It would add its logits to a sum of losses."""
    settings: Any = {"r": 4, "target_modules": ["lm_head"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(patch_model(tiny_llama()), LoraConfig(**settings))
    ids = torch.arange(9)[None]
    with pytest.raises(
        ValueError, match=r"the output head, a Linear, was changed .* \(leave it out of target_modules\)"
    ):
        model(input_ids=ids, layout=Layout({0: (Segment(0, 0, 9),)}), shift_labels=ids, num_items_in_batch=9)


class ScaledByCall(torch.nn.Linear):
    """Rounds its inputs to 8 bits, with one scale for all rows of a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self._rounded(x, x.abs().max()))

    def _rounded(self, x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return torch.round(x / largest * 127) * largest / 127


class ScaledByRow(ScaledByCall):
    """Has a scale for each row."""

    called = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.called = True
        return torch.nn.functional.linear(self._rounded(x, x.abs().amax(-1, keepdim=True)), self.weight, self.bias)


@pytest.mark.parametrize("make", [tiny_llama, partial(tiny_general, "qwen3")], ids=["llama", "qwen3"])
def test_quantised_layers_whose_rows_meet_are_refused(make: Callable[[], Any]):
    # As no tiny copy would show, whose weights are plain.
    for layer, refused in ((ScaledByCall, True), (ScaledByRow, False)):
        model = make()
        model.model.layers[1].mlp.down_proj = layer(96, 64, bias=False)
        if refused:
            with pytest.raises(
                ValueError, match=r"model\.layers\.1\.mlp\.down_proj is a ScaledByCall, whose result for a token"
            ):
                patch_model(model)
        else:
            assert is_patched(patch_model(model))
            assert not model.model.layers[1].mlp.down_proj.called, (
                "some layers pack their weights anew when they are called"
            )


def test_other_adapters_of_single_tokens_are_patched():
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(tiny_llama(), config)
    assert is_patched(patch_model(model))


def test_weights_of_four_bits_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="load_in_4bit needs a CUDA device, and torch sees none"):
        four_bit_weights(torch.bfloat16)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_copy_of_a_tied_weight_is_refused_where_fsdp_would_hold_both(name: str):
    def refused(sharding: Any, tied: bool, ensure: bool) -> list[tuple[str, str]]:
        model = tiny_llama(tie_word_embeddings=tied)
        lora = LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=[name], task_type="CAUSAL_LM", ensure_weight_tying=ensure
        )
        plugin = LongContextPlugin(capacity=8, sharding=sharding)
        return problems(Request(stated({}), plugin, get_peft_model(model, lora), 2, sharding))

    for sharding in ("zero1", "zero3"):
        ((key, rule),) = refused(sharding, tied=True, ensure=False)
        assert (key, rule.startswith(f"'{sharding}' with modules_to_save=['{name}']: ")) == ("sharding", True)
        assert "ensure_weight_tying=True" in rule
        assert not refused(sharding, tied=True, ensure=True)
    assert not refused("zero3", tied=False, ensure=False)
    assert not refused("ddp", tied=True, ensure=False)


def test_a_weight_that_adapters_of_several_layers_share_is_refused_where_fsdp_would_hold_each_layer():
    def refused(config: Any, sharding: Any, ranks: int = 2) -> list[tuple[str, str]]:
        model = get_peft_model(tiny_llama(), config)
        plugin = LongContextPlugin(capacity=8, sharding=sharding)
        return problems(Request(stated({}), plugin, model, ranks, sharding))

    shared = TinyLoraConfig(r=2, target_modules=["o_proj"])
    ((key, rule),) = refused(shared, "zero3")
    assert (key, "of which layers share base_model" in rule) == ("sharding", True)
    assert not refused(shared, "ddp")
    assert not refused(shared, "zero3", ranks=1)
    for own in (LoraConfig(r=2, target_modules=["o_proj"]), VeraConfig(r=4, target_modules=["o_proj"])):
        assert not refused(own, "zero3")
