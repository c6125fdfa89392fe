"""Scores and prefilled caches across ranks are those of plain transformers on one process, for every family.

Both sides compute in float64 and differ by the order of sums: log-probabilities agree to 1e-8, keys, values and logits
to 1e-10 of the largest. What `generate` chooses afterwards is the same, token by token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import Exchange, Layout, Topology, patch_model, prefill, score, zigzag
from hf_longctx.certificate import float64_throughout
from hf_longctx.inference.score import planned
from tests.builders.plain_reference import exact_scores
from tests.builders.plain_scores import exchange_of_this_rank, plain_scores
from tests.builders.tiny_models import FAMILIES, TINY, tiny_bloom, tiny_general, tiny_llama, tiny_mistral
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool

LENGTHS = (17, 1, 50, 8, 29, 2, 1, 33)
"""Tokens of the documents: in no order, some longer than every window, some of a single token."""
DOCUMENTS = [(torch.arange(length) * 37 + doc) % 128 for doc, length in enumerate(LENGTHS)]
PROMPT = DOCUMENTS[2]
NEW_TOKENS = 8


def from_fields(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY))


def assert_scores(ours: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert [scores.shape for scores in ours] == [scores.shape for scores in right]
    for mine, expected in zip(ours, right):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-8)


def scored(families: list[str], documents: Any, **settings: Any) -> dict[str, list[torch.Tensor]]:
    """On one rank, with NCCL's order of operations."""
    exchange = exchange_of_this_rank()
    with in_order_communicators():
        return {
            family: score(patch_model(FAMILIES[family](torch.float64)), documents, exchange=exchange, **settings)
            for family in families
        }


def test_processes_that_have_not_met_are_told(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(tiny_llama())
    monkeypatch.setenv("WORLD_SIZE", "1")
    score(model, DOCUMENTS[:1])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(
        UserWarning, match=r"WORLD_SIZE says 2 processes, and no process group was begun: score does all"
    ) as told:
        score(model, DOCUMENTS[:1])
    assert told[0].filename == __file__, "it names the caller's line"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (1, {"capacity": 50}),  # the longest document fills a micro-batch
        (2, {"capacity": 27}),  # 141 tokens: at least three micro-batches, the longest document on both ranks
        (4, {}),
        (4, {"capacity": 13, "ulysses": 2}),
    ],
)
def test_scores_are_those_of_one_process(ranks: int, settings: dict[str, Any], request: pytest.FixtureRequest):
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    by_rank = pool.run(scored, list(FAMILIES), DOCUMENTS, **settings)
    for family, make in FAMILIES.items():
        right = plain_scores(make(torch.float64).eval(), DOCUMENTS)
        for ours in by_rank:
            assert_scores(ours[family], right)
            assert all(map(torch.equal, ours[family], by_rank[0][family]))


@pytest.mark.parametrize("documents", [[[5, 6]], [[7]], [[7], [3, 1, 4]], []], ids=str)
def test_fewer_tokens_than_ranks(documents: list[list[int]], ranks4: RankPool):
    right = plain_scores(FAMILIES["llama"](torch.float64).eval(), [torch.tensor(ids) for ids in documents])
    for ours in ranks4.run(scored, ["llama"], documents, ulysses=4):
        assert_scores(ours["llama"], right)


def bytes_of_scores(documents: list[torch.Tensor]) -> int:
    exchange = exchange_of_this_rank()
    before = exchange.bytes_sent
    score(patch_model(tiny_llama()), documents, exchange=exchange)
    return exchange.bytes_sent - before


def test_whole_documents_send_their_scores_and_nothing_else(ranks4: RankPool):
    """Each rank: a fingerprint and one float32 for each label of its document, to each of three others. The first broadcasts by
    which device documents are planned."""
    sent = 3 * (8 + 19 * 4)
    assert ranks4.run(bytes_of_scores, [torch.arange(20)] * 4) == [sent + 8, sent, sent, sent]


def plans_of_unlike_ranks(lengths: list[int], presets: list[str]) -> tuple[list[int], int]:
    """On one rank that has its own of these devices: costs of the micro-batches, and the plan's digest."""
    exchange = exchange_of_this_rank()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hf_longctx.inference.score.preset_name", lambda device: presets[exchange.rank])
        plan = planned(tiny_llama(), lengths, Topology(2, 40), exchange)
    return plan.cost.tolist(), plan.digest()


def test_ranks_on_unlike_devices_plan_alike(ranks2: RankPool):
    """By the first one's device: what they are told differs by more than a thousand times."""
    first = ranks2.run(plans_of_unlike_ranks, [40, 50, 9], ["h100", "cpu-none"])
    other = ranks2.run(plans_of_unlike_ranks, [40, 50, 9], ["cpu-none", "h100"])
    assert first[0] == first[1]
    assert other[0] == other[1]
    assert first[0][0] != other[0][0]


def test_a_prompt_lies_as_a_plan_lays_what_needs_all_ranks():
    """`prefill` gives every rank its part in zigzag, which is the planner's layout of a document on all ranks."""
    for ranks, ulysses in ((1, 1), (3, 1), (4, 2)):
        topology = Topology(ranks, 100 // ranks + 1, ulysses_degree=ulysses)
        plan = planned(tiny_llama(), [100], topology, None)
        expected = Layout(zigzag(0, 100, range(ranks)), ulysses)
        assert [plan.layouts(rank) for rank in range(ranks)] == [[(0, expected)]] * ranks


def test_scores_on_one_process_without_an_exchange():
    """Documents as lists; logits of no more than `loss_chunk_tokens` rows exist at once."""
    model = patch_model(tiny_llama(torch.float64), loss_chunk_tokens=8)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda head, inputs, logits: rows.append(logits.shape[1]))
    ours = score(model, [ids.tolist() for ids in DOCUMENTS])
    assert_scores(ours, plain_scores(tiny_llama(torch.float64).eval(), DOCUMENTS))
    assert max(rows) == 8
    assert sum(rows) == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize(
    "settings", [{"model_type": "gemma2", "final_logit_softcapping": 0.5}, {"model_type": "granite"}]
)
def test_what_a_class_does_to_its_logits_is_done(settings: dict[str, Any]):
    """A soft cap, a scale: in scores, after a prompt, and where a rank has a document of one token."""
    config = AutoConfig.for_model(**settings, **TINY, logits_scaling=8.0, query_pre_attn_scalar=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    with float64_throughout():
        right = plain_scores(model, DOCUMENTS)
        with torch.no_grad():
            after = model(PROMPT[None]).logits[0, -1]
        patch_model(model)
        assert_scores(score(model, DOCUMENTS, capacity=50), right)
        torch.testing.assert_close(prefill(model, PROMPT)[0], after, rtol=0, atol=1e-10)
        assert_scores(score(model, DOCUMENTS[1:2] + DOCUMENTS[6:7]), [right[1], right[6]])


def test_the_model_is_left_as_it_was():
    """Dropout is off while scoring; modes, gradients and the mode of gradients are those of before."""
    model = patch_model(tiny_bloom(torch.float64, hidden_dropout=0.5)).train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    assert_scores(score(model, DOCUMENTS), plain_scores(tiny_bloom(torch.float64).eval(), DOCUMENTS))
    logits, cache = prefill(model, PROMPT)
    assert cache is not None
    assert not any(tensor.requires_grad for tensor in (logits, *next(iter(cache))[:2]))
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(model, DOCUMENTS)
    assert [module.training for module in model.modules()] == modes


def test_scores_of_low_precision_are_normalised_in_float32():
    """bfloat16 has 8 bits of mantissa: log-probabilities here are about 5, so that 0.1 is 2 % of them."""
    right = plain_scores(tiny_llama().eval(), DOCUMENTS)
    autocast = patch_model(tiny_llama())
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = score(autocast, DOCUMENTS)
    for ours in (under_autocast, score(patch_model(tiny_llama(torch.bfloat16)), DOCUMENTS)):
        for mine, expected in zip(ours, right):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, expected, rtol=0, atol=0.1)


def continued(model: Any, prompt: torch.Tensor, **cached: Any) -> torch.Tensor:
    """[new tokens], greedily."""
    ids = prompt[None]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(PROMPT) + NEW_TOKENS - ids.shape[1],
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,  # MPT's configuration says False
        **cached,
    )[0, len(PROMPT) :]


def prefilled(families: list[str], prompt: torch.Tensor, **settings: Any) -> dict[str, Any]:
    """On one rank, for each family: logits, (keys, values, tokens seen) of each layer, what generate makes of them."""
    exchange = exchange_of_this_rank()
    results = {}
    for family in families:
        model = patch_model(FAMILIES[family](torch.float64))
        with in_order_communicators():
            logits, cache = prefill(model, prompt, exchange=exchange, **settings)
        layers = new = None
        if cache is not None:
            layers = [(keys, values, cache.get_seq_length(i)) for i, (keys, values, *_) in enumerate(cache)]
            if len(prompt) == len(PROMPT):
                new = continued(model.eval(), torch.cat([prompt, logits.argmax().view(1)]), past_key_values=cache)
        results[family] = (logits, layers, new)
    return results


def assert_prefilled(ours: Any, family: str, prompt: torch.Tensor) -> None:
    plain = FAMILIES[family](torch.float64).eval()
    with exact_scores(plain), torch.no_grad():
        right = plain(prompt[None], use_cache=True)
    logits, layers, _ = ours
    torch.testing.assert_close(logits, right.logits[0, -1], rtol=0, atol=1e-10 * float(right.logits.abs().max()))
    assert len(layers) == len(right.past_key_values.layers) == 2
    for (keys, values, length), layer in zip(layers, right.past_key_values.layers):
        assert length == len(prompt)
        for mine, expected in ((keys, layer.keys), (values, layer.values)):
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "ulysses"), [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.nightly), (4, 2)])
def test_generation_goes_on_from_a_prefilled_cache(ranks: int, ulysses: int, request: pytest.FixtureRequest):
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    by_rank = pool.run(prefilled, list(FAMILIES), PROMPT, ulysses=ulysses)
    for family, make in FAMILIES.items():
        new = continued(make(torch.float64).eval(), PROMPT)
        for ours in by_rank:
            assert_prefilled(ours[family], family, PROMPT)
            assert torch.equal(ours[family][2], new)
            assert len(new) == NEW_TOKENS


OTHERS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": partial(tiny_general, "deepseek_v3"),
    **{family: partial(from_fields, family) for family in ("diffllama", "hrm_text")},
}
"""Families that cache something else than what they attend to: a latent, values before they are paired, each turn of a loop."""


def prefilled_of_another(family: str) -> tuple[torch.Tensor, list[Any], torch.Tensor]:
    """On one rank: logits, keys and values of each layer, what generate makes of them."""
    model = patch_model(OTHERS[family]())
    exchange = exchange_of_this_rank() if torch.distributed.is_initialized() else None
    logits, cache = prefill(model, PROMPT, exchange=exchange)
    assert cache is not None
    layers = [(keys, values) for keys, values, *_ in cache]
    return logits, layers, continued(model.eval(), torch.cat([PROMPT, logits.argmax().view(1)]), past_key_values=cache)


def assert_cached_as_plain(family: str, logits: torch.Tensor, layers: list[Any], new: torch.Tensor) -> None:
    """Compare with plain transformers, in float32: in float64, modeling code of DeepSeek's does not run."""
    plain = OTHERS[family]().eval()
    with torch.no_grad():
        right = plain(PROMPT[None], use_cache=True)
    torch.testing.assert_close(logits, right.logits[0, -1], rtol=0, atol=1e-5)
    for of_layer, expected in zip(layers, right.past_key_values.layers, strict=True):
        for mine, theirs in zip(of_layer, (expected.keys, expected.values)):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert torch.equal(new, continued(plain, PROMPT))


@pytest.mark.parametrize("family", ["diffllama", "hrm_text"])
def test_what_a_layer_caches_need_not_be_what_it_attends_to(family: str):
    assert_cached_as_plain(family, *prefilled_of_another(family))


@pytest.mark.processes
def test_latents_of_two_dimensions_are_cached_over_ranks(ranks2: RankPool):
    for logits, layers, new in ranks2.run(prefilled_of_another, "deepseek_v3"):
        assert layers[0][0].shape[-1] != layers[0][1].shape[-1]
        assert_cached_as_plain("deepseek_v3", logits, layers, new)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_prompts_of_about_as_many_tokens_as_ranks(length: int, ranks4: RankPool):
    """Fewer tokens than ranks, and prompts that a window covers."""
    for ours in ranks4.run(prefilled, ["llama", "mistral"], PROMPT[:length], ulysses=4):
        for family in ("llama", "mistral"):
            assert_prefilled(ours[family], family, PROMPT[:length])


def bytes_of_prefill(window: int | None, to: Any) -> tuple[int, bool]:
    exchange = exchange_of_this_rank()
    before = exchange.bytes_sent
    _, cache = prefill(patch_model(tiny_mistral(sliding_window=window)), torch.arange(40), exchange=exchange, to=to)
    return exchange.bytes_sent - before, cache is not None


@pytest.mark.parametrize(("window", "own_and_sent"), [(None, (20, 20)), (7, (6, 0))], ids=["full", "window"])
def test_only_ranks_that_want_the_cache_receive_it(window: int | None, own_and_sent: tuple[int, int], ranks2: RankPool):
    """Rank 0 holds tokens 0 to 9 and 30 to 39, rank 1 the 20 between. A cache row is 2 layers x 2 x 2 heads x 16 float32;
    of 7 tokens that a query sees, 6 are before it."""
    row = 2 * 2 * 2 * 16 * 4
    to_all, to_0, to_1 = ([pair[0] for pair in ranks2.run(bytes_of_prefill, window, to)] for to in ("all", 0, 1))
    of_rank_0, of_rank_1 = own_and_sent
    assert [to_all[0] - to_0[0], to_all[1] - to_0[1]] == [of_rank_0 * row, 0]
    assert [to_all[0] - to_1[0], to_all[1] - to_1[1]] == [0, of_rank_1 * row]
    assert [pair[1] for pair in ranks2.run(bytes_of_prefill, window, 1)] == [False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: score(tiny_llama(), DOCUMENTS),
            r"LlamaForCausalLM cannot run .* hf_longctx.patch_model\(model\)",
        ),
        (
            lambda model: score(torch.nn.Sequential(model), DOCUMENTS),
            r"Sequential cannot run .* pass the model inside",
        ),
        (
            lambda model: score(model, DOCUMENTS, capacity=49),
            r"document 2 has 50 tokens; 1 ranks x 49 tokens of capacity hold 49. It needs a capacity >= 50, or >= 2 ranks",
        ),
        (lambda model: score(model, DOCUMENTS, capacity=0), "capacity is 0; it must be >= 1"),
        (lambda model: score(model, DOCUMENTS, ulysses=0), "ulysses=0: heads are split over at least 1 rank"),
        (lambda model: score(model, [[1], []]), r"document 1 has shape \(0,\) .* at least one"),
        (lambda model: score(model, [PROMPT[None]]), r"document 0 has shape \(1, 50\) .* pass input_ids\[i\]"),
        (lambda model: score(model, [torch.ones(1)]), r"document 0 has .* dtype torch.float32: token ids are integers"),
        (lambda model: score(model, [[3, 128]]), "document 0 holds token ids 3 to 128; the model knows 0 to 127"),
        (lambda model: score(model, [[3, -100]]), "document 0 holds token ids -100 to 3; the model knows 0 to 127"),
        (lambda model: prefill(model, []), r"the prompt has shape \(0,\)"),
        (lambda model: prefill(model, PROMPT, to=1), "to=1 is none of the 1 ranks; valid: 'all', or 0 to 0"),
        (lambda model: prefill(tiny_llama(), PROMPT), "LlamaForCausalLM cannot run"),
    ],
)
def test_what_is_refused(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call(patch_model(tiny_llama()))


def error_of(documents_of_rank: list[Any], settings_of_rank: list[Any]) -> str:
    exchange = exchange_of_this_rank()
    with pytest.raises(ValueError, match="passed other arguments") as error:
        score(
            patch_model(tiny_llama()),
            documents_of_rank[exchange.rank],
            exchange=exchange,
            **settings_of_rank[exchange.rank],
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("documents", "settings"),
    [
        ([[[1, 2, 3]]] * 3 + [[[1, 2, 4]]], [{}] * 4),
        ([[[1, 2], [3]]] * 3 + [[[1], [2, 3]]], [{}] * 4),
        ([[[1, 2, 3]]] * 4, [{}] * 3 + [{"capacity": 10}]),
    ],
    ids=["tokens", "lengths", "settings"],
)
def test_ranks_that_disagree_all_say_so(documents: list[Any], settings: list[Any], ranks4: RankPool):
    for rank, message in enumerate(ranks4.run(error_of, documents, settings)):
        assert message.startswith(
            f"ranks [3] passed other arguments to score than rank 0, or refused theirs; on rank {rank}: "
        )


def refusals(arguments: list[dict]) -> str:
    """Each rank scores with its own arguments."""
    import hf_longctx

    exchange = Exchange()
    model = patch_model(tiny_llama())
    try:
        hf_longctx.score(model, [[1, 2, 3]], exchange=exchange, **arguments[exchange.rank])
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_that_refuses_its_arguments_is_not_waited_for(ranks2: RankPool):
    first, second = ranks2.run(refusals, [{"ulysses": 1}, {"ulysses": 0}])
    assert "ranks [1] passed other arguments to score than rank 0, or refused theirs" in first
    assert "ulysses=0" in second


def test_tokens_may_be_of_any_width():
    """Tokens of a memory map are uint16, of which torch has no smallest."""
    model, ids = patch_model(tiny_llama()), [3, 5, 7, 9]
    [expected], [narrow] = score(model, [ids]), score(model, [np.array(ids, np.uint16)])
    assert torch.equal(narrow, expected)
