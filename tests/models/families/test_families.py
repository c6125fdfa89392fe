"""Every family over layouts, window and ALiBi included: packed documents on one process, and zigzag over 2 and 4 ranks.

Reference: plain transformers on each document alone, in float64 (tests/builders/plain_reference.py). The loss and every
gradient agree to 1e-10 of the largest gradient of that parameter; both sides compute in float64 and differ by the order of
sums.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from hf_longctx import Layout, Segment, patch_model, zigzag
from hf_longctx.attention.exchange import Exchange
from hf_longctx.models.layout_mask import CollectedKeys
from tests.builders.plain_reference import exact_scores, reference_loss
from tests.builders.tiny_models import FAMILIES, tiny_bloom, tiny_mpt
from tests.worlds.rank_pool import RankPool, worker_state

LENGTHS = (29, 1, 8, 17)
"""Tokens of the documents: some longer than every window, one of a single token."""
DOCUMENTS = [((ids := torch.arange(length) * 37 % 128 + doc), ids) for doc, length in enumerate(LENGTHS)]
LABEL_TOKENS = sum(LENGTHS) - len(LENGTHS)
TOLERANCE = 1e-10
ONE_DOCUMENT = Layout({0: (Segment(0, 0, LENGTHS[0]),)})


def zigzag_layout(ranks: int, ulysses: int = 1) -> Layout:
    """Every document over all ranks; its first rank moves on from one document to the next."""
    shards: dict[int, tuple[Segment, ...]] = dict.fromkeys(range(ranks), ())
    for doc, length in enumerate(LENGTHS):
        order = [(doc + i) % ranks for i in range(ranks)]
        for rank, segments in zigzag(doc, length, order).items():
            shards[rank] += segments
    return Layout(shards, ulysses)


def loss_and_gradients(
    model: Any, layout: Layout, exchange: Exchange | None = None, checkpointing: bool = False
) -> dict[str, torch.Tensor]:
    """This rank's part of the loss of DOCUMENTS and of every gradient."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard = layout.shard(exchange.rank if exchange is not None else 0)
    shifted = [torch.cat([labels[1:], torch.tensor([-100])]) for _, labels in DOCUMENTS]
    loss = model(
        input_ids=torch.cat([DOCUMENTS[s.doc][0][s.start : s.stop] for s in shard])[None],
        shift_labels=torch.cat([shifted[s.doc][s.start : s.stop] for s in shard])[None],
        layout=layout,
        exchange=exchange,
        num_items_in_batch=LABEL_TOKENS,
        num_tokens_in_batch=sum(LENGTHS),
    ).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def expected(model: Any) -> dict[str, torch.Tensor]:
    loss = reference_loss(model.train(), DOCUMENTS, stock=False)
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == right.keys()
    errors = {name: float((ours[name] - value).abs().max() / value.abs().max()) for name, value in right.items()}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_on_one_process(family: str, kernel: str):
    model = patch_model(FAMILIES[family](torch.float64), kernel=kernel)
    assert_equal(loss_and_gradients(model, zigzag_layout(1)), expected(FAMILIES[family](torch.float64)))


def on_a_rank(families: list[str], layout: Layout, settings: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Sums over the ranks, for each family; without and then with activation checkpointing."""
    if "exchange" not in worker_state:
        worker_state["exchange"] = Exchange()
    exchange = worker_state["exchange"]
    sums = {}
    for family in families:
        for checkpointing in (False, True):
            model = patch_model(FAMILIES[family](torch.float64), **settings)
            sums[f"{family}-{checkpointing}"] = loss_and_gradients(model, layout, exchange, checkpointing)
            for tensor in sums[f"{family}-{checkpointing}"].values():
                dist.all_reduce(tensor)
    return sums


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ulysses", "settings"),
    [
        pytest.param(1, {}, id="direct", marks=pytest.mark.nightly),
        pytest.param(1, {"keep_last_slice": True}, id="direct, keeping the last slice"),
        pytest.param(2, {}, id="ulysses of 2"),
    ],
)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_documents_over_ranks(ranks: int, ulysses: int, settings: dict[str, Any], request: pytest.FixtureRequest):
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    by_rank = pool.run(on_a_rank, list(FAMILIES), zigzag_layout(ranks, ulysses), settings)
    for family, make in FAMILIES.items():
        right = expected(make(torch.float64))
        for checkpointing in (False, True):
            for sums in by_rank:
                assert_equal(sums[f"{family}-{checkpointing}"], right)


@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: tiny_bloom(dtype, apply_residual_connection_post_layernorm=True),
        lambda dtype: tiny_bloom(dtype, tie_word_embeddings=False),
        lambda dtype: tiny_bloom(dtype, slow_but_exact=True),  # with pretraining_tp=1 it changes nothing
        lambda dtype: tiny_mpt(dtype, attn_config={"clip_qkv": 0.7, "softmax_scale": 0.4}),
        lambda dtype: tiny_mpt(dtype, attn_config={"alibi_bias_max": 4}, logit_scale=0.5, no_bias=False),
    ],
    ids=["residual after the norm", "untied", "slow but exact", "clipped and scaled", "not read by transformers"],
)
def test_settings_of_alibi_models(make: Any):
    assert_equal(loss_and_gradients(patch_model(make(torch.float64)), zigzag_layout(1)), expected(make(torch.float64)))


def test_hidden_dropout_is_that_of_transformers():
    ids = DOCUMENTS[0][0][None]
    patched, plain = (tiny_bloom(torch.float64, hidden_dropout=0.3).train() for _ in range(2))
    torch.manual_seed(1)
    with torch.no_grad():
        ours = patch_model(patched)(input_ids=ids, layout=ONE_DOCUMENT).logits
    torch.manual_seed(1)
    with exact_scores(plain), torch.no_grad():
        right = plain(ids).logits
    assert float((ours - right).abs().max()) <= TOLERANCE * float(right.abs().max())
    torch.manual_seed(2)
    assert not torch.allclose(patched(input_ids=ids, layout=ONE_DOCUMENT).logits, right)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 16, 24])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_slopes_are_those_of_transformers(family: str, heads: int, monkeypatch: pytest.MonkeyPatch):
    """Also where they are no powers of two: the slopes that reach the engine are bias differences of neighbours."""
    model: Any
    if family == "bloom":
        model = tiny_bloom(hidden_size=8 * heads, n_head=heads)
        bias = build_alibi_tensor(torch.ones(1, 4), heads, torch.float32)[:, 0]
    else:
        model = tiny_mpt(d_model=8 * heads, n_heads=heads)
        bias = build_mpt_alibi_tensor(heads, 4)[:, 0]
    given = []

    def kept(*args: Any, alibi_slopes: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given.append(alibi_slopes)
        return args[0]

    monkeypatch.setattr("hf_longctx.models.attention.layout_attention", kept)
    patch_model(model)(input_ids=DOCUMENTS[0][0][None], layout=ONE_DOCUMENT)
    assert len(given) == 2
    for slopes in given:
        assert slopes.dtype == torch.float32
        torch.testing.assert_close(slopes, bias[:, 2] - bias[:, 1], rtol=1e-6, atol=0)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_tokens_squared_is_built(family: str):
    """The largest tensor is linear in tokens: of the 2048 tokens at most 4 * hidden (the MLP) or 4 copies of a row."""
    tokens = 2048
    model = patch_model(FAMILIES[family]()).train()
    ids = torch.arange(tokens)[None] % 128
    with LargestTensor() as largest:
        model(
            input_ids=ids,
            shift_labels=ids,
            layout=Layout({0: (Segment(0, 0, tokens),)}),
            num_items_in_batch=tokens,
            num_tokens_in_batch=tokens,
        ).loss.backward()
    assert 0 < largest.elements <= 4 * model.config.hidden_size * tokens < tokens**2


@pytest.mark.parametrize("family", FAMILIES)
def test_collected_keys_and_values_are_those_of_a_cache(family: str):
    collected = CollectedKeys()
    model = patch_model(FAMILIES[family](torch.float64)).eval()
    plain = FAMILIES[family](torch.float64).eval()
    with torch.no_grad():
        model(input_ids=torch.cat([ids for ids, _ in DOCUMENTS])[None], layout=zigzag_layout(1), collect=collected)
        assert sorted(collected.of_layer) == [0, 1]
        row = 0
        for ids, _ in DOCUMENTS:
            with exact_scores(plain):
                cached = plain(ids[None], use_cache=True)
            for index, layer in enumerate(cached.past_key_values.layers):
                for ours, right in zip(collected.of_layer[index], (layer.keys, layer.values)):
                    seen = right.shape[2]  # a sliding cache keeps the window only
                    assert ours.shape == (sum(LENGTHS), right.shape[1], right.shape[3])
                    document = ours[row : row + len(ids)].transpose(0, 1)
                    torch.testing.assert_close(document[:, -seen:], right[0], rtol=0, atol=1e-10)
            row += len(ids)


@pytest.mark.parametrize("family", ["bloom", "mpt", "llama"])
def test_hidden_states_are_those_of_transformers(family: str):
    ids = DOCUMENTS[0][0][None]
    plain = FAMILIES[family](torch.float64)
    with torch.no_grad(), exact_scores(plain):
        right = plain(ids, output_hidden_states=True).hidden_states
        ours = patch_model(FAMILIES[family](torch.float64))(
            input_ids=ids, layout=ONE_DOCUMENT, output_hidden_states=True
        )
    assert len(ours.hidden_states) == len(right) == 3
    for state, expected_state in zip(ours.hidden_states, right):
        torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-10 * float(expected_state.abs().max()))
