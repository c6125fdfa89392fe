"""Losses by position and length are those of plain transformers on one process; answers count as found if and only if plain
greedy decoding writes them; two models are compared document by document.

Losses are computed in float64 on both sides and differ by the order of sums: they agree to 1e-8.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch

from hf_longctx import patch_model
from hf_longctx.inference.evaluation.batches import batches_of
from hf_longctx.inference.evaluation.comparison import compare
from hf_longctx.inference.evaluation.evaluate import compared_json, evaluate_model
from hf_longctx.inference.evaluation.greedy import greedy_answers
from hf_longctx.inference.evaluation.losses import DocumentLosses, as_documents, powers_of_two, scored_tokens
from hf_longctx.inference.evaluation.retrieval import PIECE_TOKENS, TASKS, cells_of, even_depths, make_trials, pieces_of
from hf_longctx.inference.evaluation.texts import joined
from tests.builders.plain_scores import exchange_of_this_rank, plain_scores
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import FAMILIES, tiny_llama
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool

NEAR = 20
LENGTHS = (300, 41, 40, 17, 2, 130, 1)
"""Tokens: several buckets of positions; just what a window holds, and one more; a document without a token to predict."""


def rows() -> list[dict[str, list[int]]]:
    """Documents of which some have labels: of one, only the last third counts."""
    drawn = np.random.default_rng(0)
    documents: list[dict[str, list[int]]] = [
        {"input_ids": drawn.integers(0, 128, length).tolist()} for length in LENGTHS
    ]
    ids = documents[0]["input_ids"]
    documents[0]["labels"] = [-100] * 200 + ids[200:]
    documents[1]["labels"] = [token if drawn.random() < 0.5 else -100 for token in documents[1]["input_ids"]]
    return documents


def log_probability(model: Any, ids: list[int]) -> float:
    """Return the log-probability of the last token, given those before it."""
    with torch.no_grad():
        return float(model(torch.tensor([ids]), use_cache=False).logits[0, -2].log_softmax(-1)[ids[-1]])


def plain_nll(model: Any) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """(document, position) -> -log p of each token that counts, given all before it, and given the window that holds it, each
    from a forward of its own."""
    whole, near = {}, {}
    for d, row in enumerate(rows()):
        ids = row["input_ids"]
        labels = row.get("labels", ids)
        for t in range(1, len(ids)):
            if labels[t] == -100:
                continue
            start = 0 if len(ids) <= 2 * NEAR or t < 2 * NEAR else (t // NEAR - 1) * NEAR
            whole[d, t] = -log_probability(model, ids[: t + 1])
            near[d, t] = -log_probability(model, ids[start : t + 1])
    return whole, near


def evaluated(family: str, capacity: int | None, many: bool = True) -> DocumentLosses:
    """On one rank, with NCCL's order of operations."""
    model = patch_model(FAMILIES[family](torch.float64))
    told: list[tuple[int, int]] = []
    with in_order_communicators():
        evaluation = evaluate_model(
            model,
            as_documents(rows()),
            exchange=exchange_of_this_rank() if many else None,
            capacity=capacity,
            near=NEAR,
            on_progress=lambda done, total: told.append((done, total)),
        )
    assert told[-1] == (scored_tokens(as_documents(rows()), NEAR),) * 2
    assert evaluation.losses is not None
    return evaluation.losses


@pytest.fixture(scope="module")
def expected() -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    return plain_nll(FAMILIES["llama"](torch.float64).eval())


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "capacity"), [(0, None), (2, 150), (4, 80)])
def test_losses_are_those_of_plain_transformers(ranks: int, capacity: Any, expected: Any, request: Any):
    whole, near = expected
    if ranks:
        pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
        by_rank = pool.run(evaluated, "llama", capacity)
    else:
        by_rank = [evaluated("llama", capacity, many=False)]
    for evaluation in by_rank:
        assert evaluation.loss == pytest.approx(np.mean(list(whole.values())), abs=1e-8)
        assert [(bucket.start, bucket.stop) for bucket in evaluation.by_position()] == [
            (0, 128),
            (128, 256),
            (256, 512),
        ]
        assert [(bucket.start, bucket.stop) for bucket in evaluation.by_length()] == [(0, 128), (128, 256), (256, 512)]
        for bucket in evaluation.by_position():
            at = [place for place in whole if bucket.start <= place[1] < bucket.stop]
            assert (bucket.tokens, bucket.documents) == (len(at), len({d for d, _ in at}))
            assert bucket.loss == pytest.approx(np.mean([whole[place] for place in at]), abs=1e-8)
            assert bucket.near_loss == pytest.approx(np.mean([near[place] for place in at]), abs=1e-8)
        for bucket in evaluation.by_length():
            at = [place for place in whole if bucket.start < LENGTHS[place[0]] <= bucket.stop]
            assert (bucket.tokens, bucket.documents) == (len(at), len({d for d, _ in at}))
            assert bucket.loss == pytest.approx(np.mean([whole[place] for place in at]), abs=1e-8)
    assert sum(abs(near[place] - whole[place]) > 1e-3 for place in whole) > 100, "the far context matters"


def test_a_model_that_cannot_look_far_has_the_same_near_loss():
    """Its two layers see 12 tokens back, so that the near context is all there is."""
    evaluation = evaluated("mistral", None, many=False)
    ids = [torch.tensor(row["input_ids"]) for row in rows()]
    plain = plain_scores(FAMILIES["mistral"](torch.float64).eval(), ids)
    counted = [document.counted[1:] for document in as_documents(rows())]
    expected = [
        -scores.numpy()[chosen].sum() for scores, chosen in zip(plain, counted)
    ]  # the last document has no score
    np.testing.assert_allclose(evaluation.nll.sum(1), expected, atol=1e-8)
    assert evaluation.near_nll is not None
    np.testing.assert_allclose(evaluation.near_nll, evaluation.nll, atol=1e-8)


def test_documents_that_cannot_be_evaluated_are_said():
    with pytest.raises(ValueError, match="none of the 2 documents holds a token to predict"):
        as_documents([[3], {"input_ids": [1, 2], "labels": [1, -100]}])
    with pytest.raises(ValueError, match="document 1: labels must be, for each of the 3 tokens"):
        as_documents([[1, 2], {"input_ids": [1, 2, 3], "labels": [1, 3, 3]}])
    with pytest.raises(
        ValueError,
        match=r"document 1 has 9 tokens; 2 ranks x 4 tokens of capacity hold 8. It needs a capacity >= 5, or >= 3 ranks",
    ):
        batches_of([3, 9], 2, 4)
    assert batches_of([3, 9, 1, 4], 2, 5) == (5, [[1], [3, 0, 2]])
    assert batches_of([3, 50_000], 2, None)[0] == 25_000


# What is found


def plain_answers(family: str, prompts: list[np.ndarray], tokens: int) -> list[np.ndarray]:
    """Return what plain transformers writes, greedily, with a cache."""
    model = FAMILIES[family](torch.float64).eval()
    answers = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt)[None]
        settings: dict[str, Any] = {
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
            "max_new_tokens": tokens,
        }
        answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].numpy())
    return answers


def found_on_rank(families: list[str], prompts: Any, answers: dict[str, Any], capacity: int | None) -> dict[str, Any]:
    with in_order_communicators():
        return {
            family: greedy_answers(
                patch_model(FAMILIES[family](torch.float64)).train(),
                prompts,
                answers[family],
                exchange=exchange_of_this_rank(),
                capacity=capacity,
            )
            for family in families
        }


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "capacity"), [(1, None), (2, 60), (4, 25), (4, None)])
def test_an_answer_is_found_if_and_only_if_greedy_decoding_writes_it(ranks: int, capacity: Any, request: Any):
    """Whole answers, and each with one of its tokens changed: the first, one inside, the last."""
    tokens, families = 4, ["llama", "mistral", "mixtral"]
    drawn = np.random.default_rng(1)
    prompts = [drawn.integers(0, 128, length) for length in (90, 1, 40, 17)]
    given, answers, right = [], {family: [] for family in families}, []  # type: ignore[var-annotated]
    written = {family: plain_answers(family, prompts, tokens) for family in families}
    for number, prompt in enumerate(prompts):
        for changed in (None, *range(tokens)):
            given.append(prompt)
            right.append(changed is None)
            for family in families:
                answer = written[family][number].copy()
                if changed is not None:
                    answer[changed] = (answer[changed] + 1) % 128
                answers[family].append(answer)
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    for by_family in pool.run(found_on_rank, families, given, answers, capacity):
        for family in families:
            assert by_family[family].tolist() == right, family


def test_what_cannot_be_asked_is_said():
    with pytest.raises(ValueError, match="a prompt or an answer is empty"):
        greedy_answers(patch_model(tiny_llama()), [np.array([1])], [np.array([], np.int64)])
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot run over a layout: .* hf_longctx.patch_model"):
        greedy_answers(tiny_llama(), [np.array([1])], [np.array([1])])


# Trials


def haystack(tokenizer: Any) -> list[list[int]]:
    words = random.Random(0)
    lines = (" ".join(words.choice(["sea", "hill", "oak"]) for _ in range(words.randrange(1, 40))) for _ in range(200))
    return pieces_of(tokenizer, ["\n".join(lines)])


def test_trials_hide_what_they_ask_for_at_the_depth_that_is_asked_for():
    tokenizer = byte_tokenizer()
    lengths, depths = [700, 3000], even_depths(5)
    assert depths == [0.0, 0.25, 0.5, 0.75, 1.0]
    pieces = haystack(tokenizer)
    trials = make_trials(tokenizer, list(TASKS), lengths, depths, trials=2, haystack=pieces, seed=7)
    assert len(trials) == 2 * 2 * 5 * 2
    for trial in trials:
        task = TASKS[trial.task]
        text, answer = tokenizer.decode(trial.prompt), tokenizer.decode(trial.answer)
        number = answer.removeprefix(" ")
        assert (len(number), number.isdigit(), len(trial.prompt) + len(trial.answer)) == (
            task.digits,
            True,
            trial.length,
        )
        assert text.startswith(task.introduction)
        word = text.rpartition("number for ")[2].partition(" ")[0]
        sentence = task.needle.format(number=number, word=word)
        asked = task.question.format(word=word)
        assert text.count(sentence) == 1
        assert text.endswith(asked)
        before, after = text.removeprefix(task.introduction).removesuffix(asked).split(sentence)
        around = before + after
        assert abs(len(before) - trial.depth * len(around)) <= PIECE_TOKENS / 2
        assert number not in around
        if task.filler is None:
            assert set(around.split()[1:-1]) == {"sea", "hill", "oak"}, "a piece may begin or end inside a word"
        else:
            assert around in task.filler * 50
    again = make_trials(tokenizer, list(TASKS), lengths, depths, trials=2, haystack=pieces, seed=7)
    assert all(np.array_equal(a.prompt, b.prompt) and np.array_equal(a.answer, b.answer) for a, b in zip(trials, again))
    other = make_trials(tokenizer, list(TASKS), lengths, depths, trials=2, haystack=pieces, seed=8)
    assert not any(np.array_equal(a.answer, b.answer) for a, b in zip(trials, other))
    cells = cells_of(trials, [trial.task == "needle" and trial.depth == 0.5 for trial in trials])
    assert len(cells) == 20
    assert {(cell.trials, cell.found) for cell in cells if (cell.task, cell.depth) == ("needle", 0.5)} == {(2, 2)}
    assert sum(cell.found for cell in cells) == 4


def test_a_beginning_of_text_and_tokens_that_join_question_and_answer():
    tokenizer = byte_tokenizer(bos=True)
    [trial] = make_trials(tokenizer, ["passkey"], [500], [0.5], trials=1)
    assert trial.prompt[0] == tokenizer.bos_token_id
    assert len(trial.prompt) + len(trial.answer) == 500
    joining = byte_tokenizer(merges=[("s", "Ġ")])  # "is 1" becomes i, "s ", 1: the question's last token is another one
    [trial] = make_trials(joining, ["passkey"], [500], [0.5], trials=1)
    assert joining.decode(trial.prompt).endswith("The pass key i")
    assert joining.decode(trial.answer).startswith("s ")
    assert len(trial.prompt) + len(trial.answer) == 500


def test_trials_that_cannot_be_made_are_said():
    tokenizer = byte_tokenizer()
    with pytest.raises(
        ValueError,
        match=r"length 100 is too short for the task 'passkey': what is said takes (\d+) tokens. Valid: at least \1",
    ):
        make_trials(tokenizer, ["passkey"], [100], [0.5], trials=1)
    with pytest.raises(ValueError, match=r"tasks \['niah'\] are unknown; valid: passkey, needle"):
        make_trials(tokenizer, ["niah"], [100], [0.5], trials=1)
    with pytest.raises(ValueError, match=r"depths \[1.5\] lie outside the text"):
        make_trials(tokenizer, ["passkey"], [100], [0.5, 1.5], trials=1)
    with pytest.raises(ValueError, match="'needle' hides its needle in real text: give a haystack"):
        make_trials(tokenizer, ["needle"], [900], [0.5], trials=1)
    with pytest.raises(ValueError, match="1 texts to hide a needle in hold no line"):
        pieces_of(tokenizer, [""])
    with pytest.raises(ValueError, match="depths=0: at least one place"):
        even_depths(0)


def test_files_are_joined_into_long_documents():
    files = [[1, 1], [2, 2, 2], [3], [4, 4], [5]]
    assert joined(files, 4) == [[1, 1, 2, 2], [3], [4, 4], [5]]
    assert joined(files[:1], 4) == [[1, 1]]


# Two models


def losses(nll: np.ndarray, tokens: np.ndarray) -> DocumentLosses:
    """Return losses of documents with 100 tokens each: one bucket."""
    return DocumentLosses(np.full(len(nll), 100), powers_of_two(100), tokens[:, None], (nll * tokens)[:, None], None)


def test_what_makes_documents_hard_is_no_part_of_a_difference():
    """Losses that vary by 1 from document to document, and differ by just 0.01: an interval without width."""
    drawn = np.random.default_rng(0)
    hard, tokens = drawn.normal(2, 1, 50), drawn.integers(10, 100, 50)
    difference = compare(losses(hard - 0.01, tokens), losses(hard, tokens)).overall
    assert difference.difference == pytest.approx(-0.01, abs=1e-12)
    assert difference.interval == pytest.approx((-0.01, -0.01), abs=1e-12)
    assert (difference.documents, difference.tokens) == (50, tokens.sum())


def test_the_interval_is_that_of_the_mean_of_independent_documents():
    """Against the normal interval, 1.96 standard errors, which holds for 400 documents of equal size; 2000 resamples give its
    ends within 10 %."""
    drawn = np.random.default_rng(3)
    extra, tokens = drawn.normal(0.02, 0.3, 400), np.full(400, 64)
    difference = compare(losses(2 + extra, tokens), losses(np.full(400, 2.0), tokens)).overall
    error = 1.96 * extra.std() / 20
    assert difference.interval == pytest.approx((extra.mean() - error, extra.mean() + error), abs=0.1 * error)
    again = compare(losses(2 + extra, tokens), losses(np.full(400, 2.0), tokens)).overall
    assert again == difference


def test_two_models_are_compared_in_each_bucket():
    documents = as_documents(rows())
    first, second = (evaluate_model(patch_model(FAMILIES[name]()), documents, near=0) for name in ("llama", "mistral"))
    difference = compared_json(first, second)
    assert first.losses is not None
    assert second.losses is not None
    assert difference["overall"]["difference"] == pytest.approx(first.losses.loss - second.losses.loss)
    for key in ("by_position", "by_length"):
        mine, theirs = first.to_json()[key], second.to_json()[key]
        for one, other, bucket in zip(mine, theirs, difference[key], strict=True):
            assert "near_loss" not in one
            assert bucket["difference"] == pytest.approx(one["loss"] - other["loss"])
            assert (bucket["from"], bucket["to"], bucket["tokens"]) == (one["from"], one["to"], one["tokens"])
            assert (bucket["interval"] is None) == (bucket["documents"] == 1)
    with pytest.raises(ValueError, match="the losses are of other tokens: 6 documents with"):
        compare(first.losses, evaluate_model(patch_model(tiny_llama()), documents[:2], near=0).losses)  # type: ignore[arg-type]
