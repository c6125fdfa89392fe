"""`hf-longctx generate` writes what plain transformers writes on one process, however many ranks have read the prompt."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_longctx.certificate import Certificate
from hf_longctx.certificate import certificate as certificates
from hf_longctx.commands.generate import Wanted, generate, generate_on_rank
from hf_longctx.models.traits import Traits
from tests.builders.plain_scores import exchange_of_this_rank
from tests.builders.small_tokenizers import word_tokenizer
from tests.builders.tiny_models import tiny_alone, tiny_llama, tiny_mistral
from tests.worlds.rank_pool import RankPool

PROMPT = " ".join(f"w{37 * number % 128}" for number in range(83))
TEMPLATE = "w1 {% for message in messages %}{{ message['content'] }} w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("generated")
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name, model in (("llama", tiny_llama()), ("mistral", tiny_mistral())):
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    return path


def plain_text(folder: Path, prompt: str, **settings: Any) -> str:
    """Return what transformers alone writes after the prompt."""
    tokenizer = word_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    given = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | settings
    new = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)


def wanted(folder: Path, prompt: str = PROMPT, **changes: Any) -> Wanted:
    settings: dict[str, Any] = {"chat": False, "max_new_tokens": NEW_TOKENS, "temperature": 0.0, "seed": 0}
    return Wanted(model=str(folder), prompt=prompt, dtype="float32", **settings | changes)


def written(asked: Wanted, many: bool = True) -> str:
    """Return what one rank prints."""
    printed = StringIO()
    with redirect_stdout(printed):
        generate_on_rank(torch.device("cpu"), exchange_of_this_rank() if many else None, asked)
    return printed.getvalue().strip()


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_text_is_that_of_plain_transformers(ranks: int, folder: Path, request: Any):
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    for name in ("llama", "mistral"):  # of Mistral, the cache holds no more than its window
        for prompt in (PROMPT, "w7", "w7 w9"):
            first, *others = pool.run(written, wanted(folder / name, prompt))
            assert first == plain_text(folder / name, prompt)
            assert len(first.split()) > NEW_TOKENS / 2, "an unknown word is not shown, and one ends the text"
            assert not any(others)


@pytest.fixture
def without_cache(tmp_path: Path) -> Path:
    tiny_alone("openai-gpt").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_that_makes_no_cache_reads_its_text_again(without_cache: Path):
    assert written(wanted(without_cache, "w7 w9 w3"), many=False) == plain_text(
        without_cache, "w7 w9 w3", use_cache=False
    )


def test_a_model_that_could_not_be_tested_writes_where_that_is_asked_for(without_cache: Path, monkeypatch: Any):
    monkeypatch.setattr(
        certificates, "certificate_of", lambda model: Certificate("Untested", False, Traits(), tested=False)
    )
    with pytest.raises(ValueError, match="Untested could not be tested"):
        written(wanted(without_cache), many=False)
    text = written(wanted(without_cache, "w7 w9 w3", uncertified=True), many=False)
    assert text == plain_text(without_cache, "w7 w9 w3", use_cache=False)


def test_a_users_message_goes_through_the_chat_template(folder: Path):
    expected = plain_text(folder / "llama", f"w1 {PROMPT} w2 w3")
    assert written(wanted(folder / "llama", chat=True), many=False) == expected
    assert expected != plain_text(folder / "llama", PROMPT)


def test_with_a_temperature_tokens_are_drawn_from_a_seed(folder: Path):
    texts = [written(wanted(folder / "llama", temperature=1.5, seed=seed), many=False) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(0)
    assert texts[0] == plain_text(folder / "llama", PROMPT, do_sample=True, temperature=1.5)


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_comes_of_logits_that_are_not_finite(temperature: float, infinite: bool, tmp_path: Path):
    model = tiny_llama()
    if infinite:  # -inf is that of a token which may not come
        model.model.embed_tokens.weight.data[:, 0] = 1e10  # the largest of a normalised state
        model.lm_head.weight.data[7, 0] = 1e38
    else:
        for name in ("q_proj", "k_proj"):
            getattr(model.model.layers[0].self_attn, name).weight.data *= 1e30
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"some logits of .* are not finite: there is no next token\. Valid: another"):
        written(wanted(tmp_path, temperature=temperature), many=False)


def test_a_prompt_is_a_text_or_a_file(folder: Path, tmp_path: Path, capsys: Any):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    generate(
        str(folder / "llama"), prompt_file=tmp_path / "prompt.txt", max_new_tokens=NEW_TOKENS, dtype="float32", cpu=True
    )
    assert capsys.readouterr().out.strip() == plain_text(folder / "llama", PROMPT)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for options, message in (
        ({}, "exactly one of --prompt TEXT and --prompt-file FILE, got neither"),
        ({"prompt": "w1", "prompt_file": tmp_path / "prompt.txt"}, "got both"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_file": tmp_path / "bytes"}, "is no text in UTF-8"),
        ({"prompt": " "}, "the prompt makes no token"),
        ({"prompt": "w1", "model": "/"}, "/ holds no config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(**{"model": str(folder / "llama"), "cpu": True} | options)  # type: ignore[arg-type]
    tiny_llama().save_pretrained(tmp_path / "plain")
    word_tokenizer().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no chat template: leave --chat out"):
        generate(str(tmp_path / "plain"), prompt="w1", chat=True, cpu=True)
