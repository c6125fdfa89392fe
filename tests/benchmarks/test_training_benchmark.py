"""The benchmark of training: steps of packs, how each way of training arranges them, and its figures."""

import pytest
import torch


def test_a_mixture_has_steps_of_full_packs():
    """So that packing loses nothing: every way of training takes these steps."""
    from training_cases import PACKS, best_fit_decreasing, mixture

    case = mixture(3, 2048, 100)
    assert sorted(document for step in case.steps for document in step) == list(range(len(case.lengths)))
    for step in case.steps:
        lengths = {document: case.lengths[document] for document in step}
        assert max(lengths.values()) <= 2048
        assert PACKS * 2048 * 0.98 <= sum(lengths.values()) <= PACKS * 2048
        packs = best_fit_decreasing(lengths, 2 * 2048)
        assert sorted(document for pack in packs for document in pack) == sorted(step)
        assert all(sum(case.lengths[document] for document in pack) <= 2 * 2048 for pack in packs)
    assert mixture(3, 2048, 100) == case
    assert len(case.tokens(4)) == case.lengths[4]
    assert case.tokens(4) == case.tokens(4) != case.tokens(5)


def test_best_fit_leaves_the_least_room():
    from training_cases import best_fit_decreasing

    # 6 and 5 open packs; 4 fits the first best, 3 the second; 2 fits where 5 and 3 are, 1 nowhere else
    lengths = {"a": 6, "b": 5, "c": 4, "d": 3, "e": 2, "f": 1}
    assert best_fit_decreasing(lengths, 10) == [("a", "c"), ("b", "d", "e"), ("f",)]
    with pytest.raises(ValueError, match="document a has 6 tokens, a pack holds 5"):
        best_fit_decreasing(lengths, 5)


def test_each_step_with_a_long_document_has_short_ones_too():
    from training_cases import long_documents

    case = long_documents(3, 4096, 100)
    for step in case.steps:
        lengths = sorted(case.lengths[document] for document in step)
        assert lengths[-1] == 4096
        assert lengths[-2] <= 1024
        assert 0.7 * 4096 < sum(lengths[:-1]) <= 4096


def test_rows_without_documents_come_first_in_a_step():
    """Accumulation counts rows, and gradients are summed on the last one of a step: it must be a real one on each rank."""
    from training_cases import Case
    from training_peers import MicroBatchRows, one_row, rows

    steps = [[(0,), (1,), (2,)], [(3,), (4, 5)]]
    assert rows(steps, 2) == ([(), (0,), (1,), (2,), (), (), (3,), (4, 5)], 2)
    assert rows(steps, 1) == ([(0,), (1,), (2,), (), (3,), (4, 5)], 3)
    with pytest.raises(ValueError, match="a step of 2 micro-batches leaves one of 3 ranks without any"):
        rows(steps, 3)
    case = Case("case", (5, 4, 3, 3, 5, 2), ((0, 1, 2), (3, 4, 5)), 100)
    dataset = MicroBatchRows(case, rows(steps, 2)[0], one_row)
    assert [int((dataset[row]["labels"] != -100).sum()) for row in range(8)] == [0, 4, 3, 2, 0, 0, 2, 5]
    assert case.label_tokens((4, 5)) == 5


def test_a_row_is_filled_up_after_its_documents():
    from training_peers import one_row

    row = {name: column[0].tolist() for name, column in one_row([[1, 2, 3], [4, 5]], multiple=4).items()}
    assert row == {
        "input_ids": [1, 2, 3, 4, 5, 0, 0, 0],
        "labels": [-100, 2, 3, -100, 5, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 4],
    }


def test_packs_attend_within_documents():
    # What the peer that packs is given in place of flash-attn, against each document alone.
    from training_peers.data_parallel import attend_within_documents

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    out, _ = attend_within_documents(None, q, k, v, None, cu_seq_lens_q=torch.tensor([0, 5, 6, 9]), scaling=0.3)
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        scores = q[0, :, start:stop] @ k[0, :, start:stop].repeat_interleave(2, 0).mT * 0.3
        scores = scores.masked_fill(~torch.ones(stop - start, stop - start).tril().bool(), float("-inf"))
        expected = scores.softmax(-1) @ v[0, :, start:stop].repeat_interleave(2, 0)
        torch.testing.assert_close(out[0, start:stop].transpose(0, 1), expected, rtol=0, atol=1e-12)


def test_padded_batches_are_even_and_their_padding_is_counted():
    from training_cases import Case
    from training_peers import Settings
    from training_peers.data_parallel import padded

    case = Case("case", (4, 1, 2, 2, 3), ((0, 1, 2, 3, 4),), 100)
    way = padded(case, Settings(8, padded_rows=2))
    assert way.dataset.ordered == [(0, 4), (1,), (2,), (3,)]
    assert way.computed == 2 * 4 + 1 + 2 + 2
    assert [tuple(way.dataset[row]["input_ids"].shape) for row in range(4)] == [(2, 4), (1, 1), (1, 2), (1, 2)]


def test_training_is_compared_with_one_process_and_the_best_of_each_kind():
    from training import summarise
    from training_cases import Case
    from training_ranks import Run

    def ranks(seconds: float, loss: float, computed: int | None = None) -> list[Run]:
        return [Run([taken], taken, [loss, 2.0], [1.0, 1.0], 100, computed) for taken in (seconds, seconds / 2)]

    case = Case("case", (30, 10, 60), ((0,), (1, 2)), 100)
    one_process = [Run([14.0], 14.0, [4.0, 2.0], [1.0, 1.0], 100, None)]
    summaries = summarise(
        case,
        {
            "ours": [ranks(8.0, 4.0), ranks(10.0, 4.0), ranks(7.0, 4.0)],
            "one process": [one_process],
            "padded": [ranks(32.0, 4.0, 400)],
            "packed to 60": [ranks(16.0, 4.0)],
            "packed to 120": [ranks(10.0, 4.0)],
            "accelerate cp=2": [ranks(20.0, 4.0)],
            "DeepSpeed Ulysses sp=2": [ranks(12.0, 4.0)],
            "accelerate cp=2, packed (wrong)": [ranks(1.0, 5.0)],
        },
    )
    ours = summaries["ours"]
    assert ours["tokens per second"] == pytest.approx(70 / 8)
    assert ours["speed over the best correct context-parallel peer's"] == pytest.approx(12 / 8)
    assert ours["speed over padding's"] == pytest.approx(4)
    assert ours["speed over the best packing's"] == pytest.approx(10 / 8)
    assert ours["share of one process's speed times the ranks"] == pytest.approx(7 / 8)
    assert summaries["padded"]["padding share"] == pytest.approx(0.75)
    assert summaries["accelerate cp=2, packed (wrong)"]["difference of loss from plain Trainer's"] == pytest.approx(
        0.25
    )


def test_each_way_of_training_is_offered_by_its_module():
    import importlib

    from training_ranks import WAYS

    for module in ("ours", "data_parallel", "torch_cp"):
        offered = importlib.import_module(f"training_peers.{module}").WAYS
        assert set(offered) == {way for way, its_module in WAYS.items() if its_module == module}
