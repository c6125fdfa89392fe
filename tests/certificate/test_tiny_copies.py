"""Tiny copies keep every switch of a configuration, are small in every size, and are the same in every process."""

import copy
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.modeling_outputs import CausalLMOutput

from hf_longctx.certificate import (
    CannotShrink,
    float64_throughout,
    ordinary_tokens,
    shrink,
    tiny_configuration,
    tiny_model,
)
from hf_longctx.certificate.field_kinds import Kind, kind_of
from hf_longctx.certificate.tiny_config import forward

QWEN3 = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
}


def published() -> dict[str, object]:
    """Configurations as people train them, with switches that defaults leave off."""
    return {
        "qwen3-8b": Qwen3Config(**QWEN3, max_position_embeddings=131072, rope_parameters=YARN, eos_token_id=151645),
        "qwen2-window": Qwen2Config(use_sliding_window=True, max_window_layers=20, attention_dropout=0.1),
        "phi3-128k": Phi3Config(
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_scaling=LONGROPE,
        ),
        "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
        "gemma3": Gemma3TextConfig(query_pre_attn_scalar=168, final_logit_softcapping=30.0),
        "granite": GraniteConfig(attention_multiplier=0.015625, logits_scaling=8.0, tie_word_embeddings=True),
        "deepseek-v3": DeepseekV3Config(),
        "maverick": Llama4TextConfig(interleave_moe_layer_step=2),
        "qwen3-next": Qwen3NextConfig(),
        "jamba": JambaConfig(),
    }


@pytest.fixture(scope="module")
def copies():
    return {name: (config, shrink(config)) for name, config in published().items()}


@pytest.mark.parametrize("name", published())
def test_only_sizes_change(copies, name):
    """Everything else stays: biases, norms, caps, multipliers, kinds of RoPE."""
    config, shrunk = copies[name]
    assert not shrunk.resisted
    by_layer = {"layer_types", "moe_layers", "no_rope_layers", "max_window_layers", "first_k_dense_replace"}
    rope = {"short_factor", "long_factor"}
    for field in shrunk.changed:
        leaf = field.rsplit(".", 1)[-1]
        assert kind_of(leaf) is not None or leaf in by_layer | rope, field
    assert type(shrunk.config) is type(config)
    assert shrunk.config.tie_word_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize("name", published())
def test_a_copy_is_small_and_looks_at_every_token(copies, name):
    _, shrunk = copies[name]
    model = tiny_model(shrunk.config).eval()
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    ids = ordinary_tokens(shrunk.config, 29)[None]
    other = ids.clone()
    other[0, 0] = ordinary_tokens(shrunk.config, 2, seed=1)[0]
    with float64_throughout() as mode, torch.no_grad():
        before, after = (forward(model, input_ids=i).logits for i in (ids, other))
    assert before.dtype == torch.float64
    assert before.isfinite().all()
    assert not torch.equal(before[0, 1:], after[0, 1:])
    assert not mode.narrowed


def test_lengths_are_below_those_of_the_documents(copies):
    for _, shrunk in copies.values():
        values = shrunk.config.to_dict()
        for name, value in values.items():
            if kind_of(name) in (Kind.WINDOW, Kind.BLOCK, Kind.TOP_K_TOKENS) and value is not None:
                assert value < 8, name


def test_relations_between_sizes_stay(copies):
    qwen3 = copies["qwen3-8b"][1].config
    assert (qwen3.num_attention_heads, qwen3.num_key_value_heads) == (8, 2)  # 32 / 8
    assert qwen3.hidden_size == qwen3.num_attention_heads * qwen3.head_dim
    assert qwen3.max_position_embeddings / qwen3.rope_parameters["original_max_position_embeddings"] == YARN["factor"]
    assert qwen3.eos_token_id < qwen3.vocab_size
    deepseek = copies["deepseek-v3"][1].config
    assert deepseek.qk_head_dim == deepseek.qk_nope_head_dim + deepseek.qk_rope_head_dim > deepseek.v_head_dim
    assert deepseek.num_experts_per_tok <= deepseek.n_routed_experts // 2
    phi3 = copies["phi3-128k"][1].config
    assert len(phi3.rope_parameters["long_factor"]) == phi3.hidden_size // phi3.num_attention_heads // 2


def test_two_layers_of_each_kind_are_kept(copies):
    assert copies["qwen3-8b"][1].layers == (0, 1)
    assert copies["gemma3"][1].config.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2
    assert (
        copies["deepseek-v3"][1].config.first_k_dense_replace == 2
    )  # of the layers 0, 1, 3, 4 the first three are dense
    maverick = copies["maverick"][1]
    assert [maverick.config.no_rope_layers[i] for i in range(6)] == [1, 1, 1, 0, 1, 0]
    assert maverick.config.moe_layers == [maverick.layers.index(i) for i in maverick.layers if i % 2]
    # Attention at every eighth layer from the fourth on is a rule of code: the first layers are kept as they are.
    assert copies["jamba"][1].layers == (0, 1, 2, 3, 4)


def test_a_model_depends_on_its_seed_alone(copies):
    config = copies["gpt-oss-20b"][1].config
    before = copy.deepcopy(config.to_dict())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tiny_model(config).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, third = tiny_model(config).state_dict(), tiny_model(config, seed=1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])
    assert config.to_dict() == before


def test_fields_that_resist_keep_their_values():
    class Stubborn(LlamaForCausalLM):
        def __init__(self, config):
            if config.intermediate_size != 640 or config.vocab_size < 100:
                raise ValueError("intermediate_size must be 640")
            super().__init__(config)

    config = LlamaConfig(hidden_size=256, intermediate_size=640, num_attention_heads=8, vocab_size=1000)
    shrunk = shrink(config, Stubborn)
    assert shrunk.resisted == ("intermediate_size",)
    assert shrunk.config.intermediate_size == 640
    assert shrunk.config.hidden_size == shrunk.config.num_attention_heads * shrunk.config.head_dim == 64


def test_what_cannot_be_built_is_named():
    class Broken(LlamaForCausalLM):
        def __init__(self, config):
            raise RuntimeError("no such layer")

    with pytest.raises(CannotShrink, match=r"no such layer.*hidden_size"):
        tiny_configuration(LlamaConfig(), Broken)


def test_special_tokens_are_not_drawn(copies):
    config = copies["qwen3-8b"][1].config
    assert config.eos_token_id not in ordinary_tokens(config, 1000)
    assert torch.equal(ordinary_tokens(config, 9), ordinary_tokens(config, 9))


def test_float64_is_kept_in_this_thread_only():
    x, positions = torch.full((3,), 1 / 3, dtype=torch.float64), torch.arange(3)
    casts = {
        "float": lambda: x.float(),
        "to": lambda: x.to(torch.float32),
        "to_keyword": lambda: x.to(dtype=torch.bfloat16),
        "softmax": lambda: torch.softmax(x, -1, dtype=torch.float32),
        "type_as": lambda: x.type_as(torch.zeros(1, dtype=torch.float32)),
        "maker": lambda: torch.zeros(3),
        "number": lambda: torch.tensor(0.1),
        "integers": lambda: positions.float(),
        "division": lambda: torch.log(1 + positions / 7),
    }
    elsewhere = []
    with float64_throughout() as mode:
        for name, cast in casts.items():
            assert cast().dtype == torch.float64, name
        assert torch.tensor([1, 2]).dtype == torch.arange(3).dtype == torch.full((1,), 2).dtype == torch.int64
        thread = threading.Thread(target=lambda: elsewhere.append(x.float().dtype))
        thread.start()
        thread.join()
        assert not mode.narrowed
    assert elsewhere == [torch.float32]
    assert x.float().dtype == torch.float32


def test_classes_of_transformers_need_not_be_named():
    config = tiny_configuration(LlamaConfig())
    assert type(tiny_model(config)) is type(AutoModelForCausalLM.from_config(config)) is LlamaForCausalLM


def test_code_of_ones_own_is_shrunk_by_the_same_rules():
    """An old-style configuration: arguments of __init__, attributes computed from them, names that transformers does not have."""

    class OwnConfig(PreTrainedConfig):
        model_type = "own"
        attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "n_layer"}  # noqa: RUF012

        def __init__(self, d_model=2048, n_layer=24, n_head=16, vocab_size=50000, pattern=None, **kwargs):
            self.d_model, self.n_layer, self.n_head, self.vocab_size = d_model, n_layer, n_head, vocab_size
            self.pattern = pattern or "".join("ab"[i % 4 == 3] for i in range(n_layer))
            self.width_of_a_head = d_model // n_head
            super().__init__(**kwargs)

    class OwnModel(PreTrainedModel):
        config_class = OwnConfig

        def __init__(self, config):
            super().__init__(config)
            width = config.width_of_a_head * config.n_head
            kinds = {"a": torch.nn.Linear, "b": torch.nn.Bilinear}
            self.embedding = torch.nn.Embedding(config.vocab_size, config.d_model)
            self.blocks = torch.nn.ModuleList(
                kinds[kind](*(config.d_model,) * (1 + (kind == "b")), width) for kind in config.pattern
            )
            self.post_init()

        def forward(self, input_ids):
            x = self.embedding(input_ids)
            for block in self.blocks:
                x = block(x, x) if isinstance(block, torch.nn.Bilinear) else block(x)
            return CausalLMOutput(logits=x @ self.embedding.weight.T)

    shrunk = shrink(OwnConfig(), OwnModel)
    assert shrunk.layers == (0, 1, 3, 7)
    assert shrunk.config.pattern == "aabb"
    assert shrunk.config.width_of_a_head * shrunk.config.n_head == shrunk.config.hidden_size == 64
    assert not shrunk.resisted
