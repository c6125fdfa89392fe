"""A document that a model has too few positions for is refused before training, with what would be valid; one that fits is
trained on. Scores, prompts and evaluations likewise."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from hf_longctx import LongContextPlugin, LongContextTrainer, patch_model, prefill, score
from hf_longctx.certificate import certificate_of
from hf_longctx.cli import main
from hf_longctx.commands.generate import Wanted, generate_on_rank
from hf_longctx.inference.evaluation.evaluate import evaluate_model
from hf_longctx.inference.evaluation.greedy import greedy_answers
from hf_longctx.inference.evaluation.losses import as_documents
from tests.builders.small_tokenizers import word_tokenizer
from tests.builders.tiny_models import tiny_general
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state

LIMIT = 40
"""Tokens that the models here have positions for."""
CUT = (
    r"longctx\.longest_document=40 with long_documents='truncate' \(its first 40 tokens are kept\), long_documents='split' "
    r"\(2 pieces, each a document of its own\) or long_documents='drop' \(it is left out\)$"
)


def tiny_gpt2() -> Any:
    sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": LIMIT}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2))


def tiny_opt() -> Any:
    sizes = {"vocab_size": 128, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=LIMIT, word_embed_proj_dim=32))


TABLES = pytest.mark.parametrize(
    ("make", "field"), [(tiny_gpt2, "n_positions"), (tiny_opt, "max_position_embeddings")], ids=["gpt2", "opt"]
)


def trainer_of(
    model: Any, lengths: list[int], folder: Path, evaluated: list[int] | None = None, **settings: Any
) -> LongContextTrainer:
    fresh_accelerator_state()
    return LongContextTrainer(
        model,
        arguments(folder, max_steps=1, eval_strategy="no" if evaluated is None else "epoch"),
        train_dataset=documents(lengths),
        eval_dataset=None if evaluated is None else documents(evaluated),
        plugin=LongContextPlugin(capacity=200, global_batch_documents=2, recalibrate_steps=0, **settings),
    )


@TABLES
def test_documents_that_fit_are_trained_and_one_token_more_is_refused(make: Any, field: str, tmp_path: Path):
    trainer = trainer_of(make(), [3, LIMIT], tmp_path)
    trainer.train()
    assert np.isfinite(trainer.state.log_history[0]["loss"])
    name = type(make()).__name__
    refused = rf"document 1 has 41 tokens, and {name} has positions for 40 \({field}=40 in its configuration\)\. Valid: .* {CUT}"
    with pytest.raises(ValueError, match=f"^{refused}"):
        trainer_of(make(), [3, LIMIT + 1], tmp_path).train()
    with pytest.raises(ValueError, match=f"^to evaluate: {refused}"):
        trainer_of(make(), [3, LIMIT], tmp_path, evaluated=[LIMIT, LIMIT + 1]).train()


def test_long_documents_are_cut_where_positions_end(tmp_path: Path):
    lengths = [3, 2 * LIMIT + 5]
    for policy, expected in (("split", [3, 5, 40, 40]), ("truncate", [3, 40]), ("drop", [3])):
        trainer = trainer_of(tiny_gpt2(), lengths, tmp_path, long_documents=policy)
        with pytest.warns(UserWarning, match="longer than 40 tokens"):
            pieces = trainer.training_steps().pieces
        assert sorted(pieces.lengths.tolist()) == expected
        assert trainer.run_state.longest_document == LIMIT
    trainer = trainer_of(tiny_gpt2(), lengths, tmp_path, long_documents="split", longest_document=LIMIT + 1)
    with (
        pytest.warns(UserWarning, match="41"),
        pytest.raises(ValueError, match=r"^a piece of document 1 has 41 tokens, and GPT2LM"),
    ):
        trainer.training_steps()


def test_settings_cut_where_positions_end():
    plugin = LongContextPlugin(capacity=50, long_documents="truncate")
    assert [plugin.first_longest_document(4, "split", most) for most in (None, 40, 300)] == [200, 40, 200]
    assert plugin.changed(longest_document=80).first_longest_document(4, "split", 40) == 80


def test_rotary_positions_have_no_end(tmp_path: Path):
    model = tiny_general("qwen3", max_position_embeddings=LIMIT)
    assert certificate_of(model).traits.positions is None
    trainer = trainer_of(model, [3, 3 * LIMIT], tmp_path)
    trainer.train()
    assert np.isfinite(trainer.state.log_history[0]["loss"])


@TABLES
def test_scores_prompts_and_evaluations_are_refused_beyond_positions(make: Any, field: str):
    model = patch_model(make())
    ids = torch.arange(5, 5 + LIMIT + 1)
    assert len(score(model, [ids[:-1]])[0]) == LIMIT - 1
    prefill(model, ids[:-1])
    with pytest.raises(ValueError, match=r"^document 1 has 41 tokens, and .* has positions for 40"):
        score(model, [ids[:-1], ids])
    with pytest.raises(ValueError, match=rf"^the prompt has 41 tokens, and .* \({field}=40 in"):
        prefill(model, ids)
    with pytest.raises(ValueError, match=r"^document 2 has 41 tokens, and .* has positions for 40"):
        evaluate_model(model, as_documents([[1, 2], [3, 4], ids.tolist()]), near=0)
    prompt, answer = ids[:-1].numpy(), ids[-1:].numpy()
    assert greedy_answers(model, [prompt], [answer]).shape == (1,), "nothing is asked after the last token"
    with pytest.raises(ValueError, match=r"^prompt 1 with its answer has 41 tokens, and .* has positions for 40"):
        greedy_answers(model, [prompt, prompt], [answer, np.array([3, 4])])


def test_texts_are_written_as_far_as_positions_reach(tmp_path: Path):
    model = tiny_gpt2()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)

    def written(new_tokens: int) -> str:
        printed = StringIO()
        prompt = " ".join(["w7"] * (LIMIT - 4))
        with redirect_stdout(printed):
            generate_on_rank(
                torch.device("cpu"), None, Wanted(str(tmp_path), prompt, False, new_tokens, 0.0, 0, "float32")
            )
        return printed.getvalue().strip()

    assert written(5)
    with pytest.raises(
        ValueError,
        match=r"^the prompt of 36 tokens, with all but the last of 6 new ones, has 41 tokens, .* such as --max-new-tokens 5$",
    ):
        written(6)


def test_a_dry_run_refuses_and_cuts_as_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fresh_accelerator_state()
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("30\n90\n41\n10")
    sizes = {"model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": LIMIT}
    settings = [f"model.random_init={json.dumps(sizes | {'attn_pdrop': 0.0})}", "training.bf16=false"]
    command = ["train", "configs/tiny.yaml", "--dry-run", "--ranks", "2", "--lengths", str(lengths), *settings]
    command.append("longctx.capacity=60")
    assert main(command) == 2
    assert "document 1 has 90 tokens, and GPT2LMHeadModel has positions" in " ".join(capsys.readouterr().err.split())
    fresh_accelerator_state()
    assert main([*command, "longctx.long_documents=split"]) == 0
    printed = capsys.readouterr()
    assert "positions documents of at most 40 tokens (n_positions=40)" in printed.out
    assert "2 of 4 documents are longer than 40 tokens" in printed.err


def test_an_evaluation_names_the_options_that_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny_gpt2().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in documents([5, LIMIT + 1])))
    command = ["evaluate", str(tmp_path / "model"), "--cpu", "--ranks", "1", "--dtype", "float32", "--data", str(data)]
    assert main([*command, "--tasks", "position"]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert f"document 1 of {data} has 41 tokens, and GPT2LMHeadModel has positions for 40" in refused
    assert refused.endswith("documents of at most 40 tokens: other --data")
    data.write_text(json.dumps(documents([LIMIT])[0]) + "\n")
    assert main([*command, "--tasks", "position"]) == 0
    assert main([*command, "--tasks", "passkey", "--lengths", "80", "--depths", "1"]) == 2
    assert "a text of --lengths has" in " ".join(capsys.readouterr().err.split())
