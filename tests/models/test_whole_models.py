"""Models that need documents whole: training, evaluation, scores and prefill plan so, and compute what one process does.

float32: as tests/training/test_trainer.py compares; log-probabilities in float64 to 1e-8.
"""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import Layout, LongContextPlugin, LongContextTrainer, Segment, patch_model, prefill, score
from hf_longctx.cli import main
from hf_longctx.hardware.model_sizes import EVEN_TOKENS, flops_of_weights
from hf_longctx.inference.evaluation.batches import batches_of
from hf_longctx.inference.evaluation.greedy import greedy_answers
from hf_longctx.layouts.layout import LayoutError
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.models.documents import documents_of
from hf_longctx.models.traits import ALONE, Traits
from hf_longctx.planner import GlobalBatches, PlanError, Topology
from hf_longctx.training.measuring.step_costs import cost_model
from hf_longctx.training.memory.activations import ActivationMemory
from hf_longctx.training.memory.out_of_memory import _proposals
from tests.builders.plain_reference import exact_scores
from tests.builders.plain_scores import exchange_of_this_rank
from tests.builders.tiny_models import RUN_ALONE, tiny_alone, tiny_llama
from tests.builders.training_runs import Run, arguments, documents, fresh_accelerator_state, reference, train
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 60, 17, 60, 2, 9, 33, 40, 8, 21]
DOCUMENTS = [(torch.arange(length) * 37 + doc) % 128 for doc, length in enumerate(LENGTHS)]
WHOLE = Traits(document_wise=("a.module",))
KINDS = pytest.mark.parametrize(("traits", "kind"), [(WHOLE, "whole"), (ALONE, "alone")], ids=["whole", "alone"])


def with_traits(traits: Traits, **settings: Any) -> Any:
    model: Any = tiny_llama(**settings)
    model.longctx_traits = traits
    return model


def test_a_models_traits_say_how_its_documents_may_lie():
    assert documents_of(tiny_llama()) == "split"
    assert documents_of(with_traits(Traits())) == "split"
    assert documents_of(with_traits(WHOLE)) == "whole"
    assert documents_of(with_traits(ALONE)) == "alone"
    assert documents_of(add_lora(with_traits(WHOLE), r=2)) == "whole"


def trained(traits: Traits, rows: Any, plugin: dict[str, Any], settings: dict[str, Any], **more: Any) -> Run:
    return train(with_traits(traits), rows, plugin, settings, **more)


@pytest.mark.processes
@pytest.mark.parametrize(("traits", "sharding"), [(WHOLE, "ddp"), (ALONE, "zero3")], ids=["whole", "alone in rounds"])
def test_training_and_evaluation_hold_every_document_whole(traits, sharding, tmp_path, ranks2: RankPool):
    rows, settings = documents(LENGTHS), {"output_dir": str(tmp_path), "max_steps": 2, "lr_scheduler_type": "constant"}
    plugin = {"capacity": 60, "global_batch_documents": 10, "sharding": sharding}
    runs = ranks2.run(trained, traits, rows, plugin, settings, eval_rows=rows)
    losses, norms, weights = reference("llama", rows, GlobalBatches(np.array(LENGTHS), 3, documents=10), 2, settings)
    for run in runs:
        np.testing.assert_allclose(run.series("loss"), losses, rtol=1e-5)
        np.testing.assert_allclose(run.series("grad_norm"), norms, rtol=1e-5)
        assert run.series("split_documents") == [0, 0]
        assert run.evaluation["eval_loss"] == pytest.approx(runs[0].evaluation["eval_loss"], rel=1e-6)
        if sharding == "ddp":
            torch.testing.assert_close(run.weights, weights, rtol=0, atol=1e-5)
    for step in zip(*(run.held for run in runs), strict=True):
        lengths = sorted(len(tokens) for rank in step for _, start, tokens in rank if start == 0)
        assert lengths == sorted(LENGTHS)
        assert all(step)


@pytest.mark.processes
@pytest.mark.parametrize(("family", "sharding"), [("openai-gpt", "zero3"), ("prophetnet", "ddp")])
def test_models_that_no_layout_reaches_train_as_a_loop_over_documents(family, sharding, tmp_path, ranks2: RankPool):
    """One with activation checkpointing; nothing but gradients is sent, and weights of the sharded one."""
    lengths = [3, 60, 17, 2, 33, 21]
    rows, settings = documents(lengths, labels=True), {"output_dir": str(tmp_path), "max_steps": 1}
    plugin = {"capacity": 60, "global_batch_documents": 6, "sharding": sharding}
    losses, norms, _ = reference(family, rows, GlobalBatches(np.array(lengths), 3, documents=6), 1, settings)
    settings["gradient_checkpointing"] = family == "prophetnet"
    runs = ranks2.run(train, family, rows, plugin, settings, eval_rows=rows)
    for run in runs:
        np.testing.assert_allclose(run.series("loss"), losses, rtol=1e-5)
        np.testing.assert_allclose(run.series("grad_norm"), norms, rtol=1e-4)
        assert run.evaluation["eval_loss"] == pytest.approx(runs[0].evaluation["eval_loss"], rel=1e-6)
        assert run.series("exchanged_mib") == [0]
    assert all(all(step) for step in zip(*(run.held for run in runs), strict=True))


@pytest.mark.parametrize("family", RUN_ALONE)
def test_a_model_that_no_layout_reaches_stays_plain_and_scores(family: str):
    plain = tiny_alone(family).eval()
    model = patch_model(patch_model(tiny_alone(family)))
    assert documents_of(model) == "alone"
    assert model.config._attn_implementation == "eager"
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    with torch.no_grad():
        logits = [plain(ids[None], use_cache=False).logits[0] for ids in DOCUMENTS]
    for ids, right, mine in zip(DOCUMENTS, logits, score(model, DOCUMENTS), strict=True):
        expected = right[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
    if family == "openai-gpt":
        with pytest.raises(ValueError, match=r"returns no cache with use_cache=True.*generate from the prompt itself"):
            prefill(model, DOCUMENTS[1])
    else:
        after, cache = prefill(model, DOCUMENTS[1])
        torch.testing.assert_close(after, logits[1][-1], rtol=0, atol=1e-5)
        assert cache.get_seq_length() == len(DOCUMENTS[1])


def test_activations_of_layers_that_nobody_names_stay_on_the_device():
    memory = ActivationMemory(patch_model(tiny_alone("openai-gpt")), device="cpu")
    alone = Layout({0: (Segment(0, 0, 60),)})
    with memory.micro_batch(alone, 0):
        assert not memory.keeps_attention(alone)
    with pytest.raises(ValueError, match=r"offload=0\.5: no layer .* Valid: activation_offload=0"):
        memory.micro_batch(alone, 0, 0.5).__enter__()


@pytest.mark.parametrize(
    "shards",
    [
        {0: (Segment(0, 0, 3), Segment(1, 0, 60))},
        {0: (Segment(1, 30, 60), Segment(1, 0, 30))},
        {0: (Segment(0, 0, 3),), 1: (Segment(1, 0, 60),)},
    ],
    ids=["packed", "out of order", "on two ranks"],
)
def test_a_layout_of_more_than_one_whole_document_is_refused(shards: Any):
    model, layout = patch_model(tiny_alone("bart")), Layout(shards)
    exchange: Any = None if len(shards) == 1 else SimpleNamespace(rank=0, world_size=2)
    with pytest.raises(LayoutError, match=r"BartForCausalLM runs one whole document .* Valid: Layout\({0: \(Segment\("):
        model(input_ids=torch.zeros(1, layout.tokens(0), dtype=torch.long), layout=layout, exchange=exchange)


def test_a_certificate_says_that_documents_run_alone(capsys):
    assert main(["certify", "openai-gpt"]) == 0
    assert "one whole document in a micro-batch" in capsys.readouterr().out
    assert main(["certify", "xlnet"]) == 2
    assert "it is not causal" in " ".join(capsys.readouterr().err.split())


@KINDS
def test_a_trainer_plans_and_cuts_for_one_rank(traits, kind, tmp_path):
    """A document is cut at what one rank holds; where none may be cut, it is refused with what would fit."""
    fresh_accelerator_state()
    trainer = LongContextTrainer(
        with_traits(traits),
        arguments(tmp_path),
        train_dataset=documents([3, 90]),
        plugin=LongContextPlugin(capacity=50, global_batch_documents=2, long_documents="split"),
    )
    trainer.world = SimpleNamespace(ranks=4, stages=1, mode="async", rank_of=lambda process: 0)
    with pytest.warns(UserWarning, match="50"):
        steps = trainer.training_steps()
    assert steps.collator.topology.documents == kind
    assert steps.pieces.limit == trainer.run_state.longest_document == 50
    assert sorted(steps.pieces.lengths.tolist()) == [3, 40, 50]
    trainer.plugin = trainer.plugin.changed(long_documents="error")
    trainer.run_data.begin(None)
    with pytest.raises(PlanError, match=f"document 1 has 90 tokens.*documents='{kind}'.*capacity >= 90"):
        trainer.training_steps()


def test_settings_cut_at_what_one_rank_holds():
    plugin = LongContextPlugin(capacity=50, long_documents="truncate")
    assert [plugin.first_longest_document(4, kind) for kind in ("split", "whole", "alone")] == [200, 50, 50]
    assert plugin.changed(longest_document=80).first_longest_document(4, "whole") == 80


def inferred(traits: Traits | None) -> tuple[Any, ...]:
    """Scores, greedy answers, a prefilled cache, and bytes sent for it, on one rank."""
    model: Any = patch_model(tiny_llama(torch.float64))
    if traits is not None:
        model.longctx_traits = traits
    exchange = exchange_of_this_rank()
    scores = score(model, DOCUMENTS, exchange=exchange, capacity=60)
    prompts, answers = [ids[:-2].numpy() for ids in DOCUMENTS if len(ids) > 3], [np.array([5, 6])] * 8
    likely = greedy_answers(model, prompts, answers, exchange=exchange)
    before = exchange.bytes_sent
    logits, cache = prefill(model, DOCUMENTS[1], exchange=exchange, to=1)
    return scores, likely, logits, cache and [layer.keys for layer in cache.layers], exchange.bytes_sent - before


@pytest.mark.processes
@KINDS
def test_inference_computes_the_same_with_documents_whole(traits, kind, ranks2: RankPool):
    plain = tiny_llama(torch.float64).eval()
    with exact_scores(plain), torch.no_grad():
        expected = [
            plain(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            for ids in DOCUMENTS
        ]
        right = plain(DOCUMENTS[1][None], use_cache=True)
    split, whole = ranks2.run(inferred, None), ranks2.run(inferred, traits)
    for rank, (scores, likely, logits, keys, sent) in enumerate(whole):
        for mine, one in zip(scores, expected, strict=True):
            torch.testing.assert_close(mine, one, rtol=0, atol=1e-8)
        assert likely.tolist() == split[rank][1].tolist()
        torch.testing.assert_close(logits, right.logits[0, -1], rtol=0, atol=1e-10)
        assert (keys is None) == (rank == 0)
        assert sent == 8  # whether arguments agree
    for mine, layer in zip(whole[1][3], right.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine, layer.keys, rtol=0, atol=1e-10)


def test_what_no_rank_holds_is_refused_before_it_is_scored():
    model = patch_model(with_traits(WHOLE))
    with pytest.raises(ValueError, match=r"document 1 has 60 tokens, .* capacity >= 60"):
        score(model, DOCUMENTS, capacity=59)
    assert batches_of([5, 9000], 4, None, "whole")[0] == 9000
    with pytest.raises(ValueError, match=r"document 1 has 90 tokens, .*more ranks do not help.* capacity >= 90"):
        batches_of([5, 90], 4, 60, "whole")


def test_memory_that_runs_out_is_not_answered_with_more_ranks():
    model, layout = with_traits(WHOLE), SimpleNamespace(tokens=lambda rank: 80, doc_lengths={0: 50, 1: 30})
    asked: Any = (model, layout, 0, Topology(2, 80, documents="whole"), SimpleNamespace(backward=False), None, 0.0)
    assert next(_proposals(*asked)) == "capacity=60, which holds the longest document"
    layout.doc_lengths = {0: 80}
    assert next(_proposals(*asked)).startswith("capacity=60 with long_documents='truncate' or 'split'")


def test_a_dry_run_says_that_documents_stay_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_longctx.models.documents.documents_of", lambda model: "whole")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, [30, 200, 200, 50, 10] * 3)))
    command = ["train", "configs/tiny.yaml", "--dry-run", "--ranks", "2", "--lengths", str(lengths)]
    settings = ["training.bf16=false", "longctx.capacity=110", "longctx.global_batch_documents=15"]
    assert main([*command, *settings]) == 2
    assert "needs every document whole on one rank" in " ".join(capsys.readouterr().err.split())
    fresh_accelerator_state()
    assert main([*command, *settings, "longctx.long_documents=truncate"]) == 0
    output = capsys.readouterr()
    assert "6 of 15 documents are longer than 110 tokens" in output.err
    assert "whole     each document lies on one rank, packed with others, with at most 110 tokens" in output.out
    assert "15 documents (0 split)" in output.out


ON_TWO = (Topology(2, 60), torch.device("cpu"))
XLM = {"emb_dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 128, "causal": True}


def test_a_model_that_cannot_be_counted_is_planned_by_its_weights_and_heads(caplog):
    """XLM's code looks at values. A split document sends as many keys and values as one of a Llama with as many heads."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlm", **XLM))
    cost = cost_model(LongContextPlugin(), model, Topology(2, 60, documents="alone"), torch.device("cpu"))
    assert cost.step_ns > 0
    assert "guessed from its weights and heads" in caplog.text
    split = cost_model(LongContextPlugin(), model, Topology(2, 60), torch.device("cpu"))
    assert split == cost
    llama = cost_model(LongContextPlugin(), tiny_llama(num_hidden_layers=1, num_key_value_heads=4), *ON_TWO)
    assert (cost.inside_ps, cost.attention_ps) == (llama.inside_ps, llama.attention_ps)
    unknown = flops_of_weights(1000, SimpleNamespace(num_hidden_layers=2))
    assert unknown.attention == max(1, unknown.linear // EVEN_TOKENS)


def test_a_dry_run_needs_no_memory_that_cannot_be_counted(tmp_path, capsys):
    fresh_accelerator_state()
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("30\n60\n50\n10")
    settings = [f"model.random_init={json.dumps(XLM | {'model_type': 'xlm'})}", "training.bf16=false"]
    command = ["train", "configs/tiny.yaml", "--dry-run", "--ranks", "2", "--lengths", str(lengths), *settings]
    assert main([*command, "longctx.capacity=60"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "alone in its micro-batch, with at most 60 tokens: no layout reaches the model's attention" in text
    assert "Memory is not shown. model_type='xlm' cannot be counted" in text


def test_generation_goes_on_from_the_state_of_a_mamba():
    # What its layers carry along the prompt is in the cache that `prefill` returns, by transformers' own name for it.
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=128, state_size=8)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt, settings = DOCUMENTS[2], {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5}
    expected = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)
    logits, cache = prefill(patch_model(model), prompt)
    assert documents_of(model) == "whole"
    ids = torch.cat([prompt, logits.argmax().view(1)])[None]
    settings["max_new_tokens"] -= 1
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), cache_params=cache, **settings)
    assert torch.equal(tokens, expected)
