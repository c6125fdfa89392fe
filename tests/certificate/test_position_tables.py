"""How long a document may be is found by running copies: of models that read a table made for the test, and of real classes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, GPT2Config

from hf_longctx.certificate.certificate import new_certificate
from hf_longctx.certificate.position_tables import longest_document
from hf_longctx.certificate.tiny_model import causal_lm_class
from hf_longctx.cli import main
from hf_longctx.layouts.layout import Layout
from hf_longctx.models.traits import ALONE, Positions, Traits

SPLIT, WHOLE = Traits(), Traits(document_wise=("a.B",))
Rows = Callable[[Any, int], int]
"""Rows of a table, by the configuration and the tokens of a call."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))


class Table(torch.nn.Module):
    """Reads a row for each position of a document."""

    def __init__(self, rows: Callable[[int], int]) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, input_ids: torch.Tensor, layout: Layout, exchange: Any) -> None:
        rank = 0 if exchange is None else exchange.rank
        if layout.positions(rank).max() >= self.rows(input_ids.shape[1]):
            raise IndexError("index out of range in self")


def longest(rows: Rows, real: dict[str, int], tiny: dict[str, int], traits: Traits = SPLIT) -> Positions | None:
    made: list[GPT2Config] = []

    def make(config: Any) -> Table:
        made.append(config)
        return Table(lambda tokens: rows(config, tokens))

    configs = [GPT2Config(**{"n_ctx": 9, **fields}) for fields in (real, tiny)]
    result = longest_document(*configs, traits, make)
    assert len(made) <= 4
    return result


@pytest.mark.parametrize("traits", [SPLIT, WHOLE, ALONE])
@pytest.mark.parametrize(
    ("rows", "real", "tiny", "expected"),
    [
        pytest.param(
            lambda config, tokens: config.n_positions,
            {"n_positions": 1024, "n_ctx": 700},
            {"n_positions": 128, "n_ctx": 128},
            Positions(1024, "n_positions", 1024),
            id="one of two fields",
        ),
        pytest.param(
            lambda config, tokens: config.n_positions - 2,
            {"n_positions": 514},
            {"n_positions": 128},
            Positions(512, "n_positions", 514),
            id="rows of another use",
        ),
        pytest.param(
            lambda config, tokens: config.n_positions - 5,
            {"n_positions": 100},
            {"n_positions": 100},
            Positions(95, "n_positions", 100),
            id="many of them, in a size that is small already",
        ),
        pytest.param(
            lambda config, tokens: min(config.n_positions, config.n_ctx + 1),
            {"n_positions": 1024, "n_ctx": 512},
            {"n_positions": 128, "n_ctx": 128},
            Positions(513, "n_ctx", 512),
            id="two tables",
        ),
        pytest.param(
            lambda config, tokens: config.n_positions,
            {"n_positions": 131072},
            {"n_positions": 131072},
            Positions(131072, "n_positions", 131072),
            id="a copy whose table a user left as large as the model's",
        ),
        pytest.param(
            lambda config, tokens: config.slots,
            {"n_positions": 1024, "slots": 900},
            {"n_positions": 128, "slots": 900},
            Positions(900, "slots", 900),
            id="a name that says nothing",
        ),
        pytest.param(lambda config, tokens: 10**9, {"n_positions": 1024}, {"n_positions": 128}, None, id="no table"),
        pytest.param(lambda config, tokens: 131, {"n_positions": 1024}, {"n_positions": 128}, None, id="no field"),
        pytest.param(lambda config, tokens: 0, {"n_positions": 1024}, {"n_positions": 128}, None, id="nothing runs"),
    ],
)
def test_the_end_of_a_table_and_its_field_are_found(rows: Rows, real, tiny, expected, traits: Traits):
    assert longest(rows, real, tiny, traits) == expected


def test_a_table_that_grows_with_the_rows_of_a_call_ends_where_documents_are_split():
    def rows(config: Any, tokens: int) -> int:
        return max(config.n_positions, tokens)

    sizes = {"n_positions": 1024}, {"n_positions": 128}
    assert longest(rows, *sizes, SPLIT) == Positions(1024, "n_positions", 1024)
    assert longest(rows, *sizes, WHOLE) is None


def test_a_class_that_refuses_other_sizes_has_no_known_end():
    def make(config: Any) -> Table:
        raise ValueError(f"n_positions={config.n_positions}")

    config = GPT2Config(n_positions=128)
    assert longest_document(config, config, SPLIT, make) is None


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("gpt2", {"n_positions": 40}, Positions(40, "n_positions", 40)),
        ("opt", {}, Positions(2048, "max_position_embeddings", 2048)),
        ("roberta", {"is_decoder": True}, Positions(510, "max_position_embeddings", 512)),
        ("codegen", {"n_ctx": 99}, Positions(2048, "n_positions", 2048)),
        ("bart", {}, Positions(1024, "max_position_embeddings", 1024)),
        ("whisper", {}, Positions(448, "max_target_positions", 448)),
        ("llama", {}, None),
        ("mpt", {"max_seq_len": 64}, None),
        ("qwen3", {}, None),
        ("xglm", {}, None),
        ("mamba", {}, None),
        ("xlstm", {}, None),
    ],
)
def test_a_certificate_says_how_long_documents_may_be(model_type: str, fields: dict[str, Any], expected):
    config = CONFIG_MAPPING[model_type](**fields)
    certificate = new_certificate(causal_lm_class(config), config)
    assert certificate.exact
    assert certificate.traits.positions == expected
    words = "" if expected is None else f", of at most {expected.tokens} tokens ({expected.field}={expected.size});"
    assert words in str(certificate)


def test_certify_says_how_long_documents_may_be(capsys: pytest.CaptureFixture[str]):
    assert main(["certify", "gpt2"]) == 0
    assert "documents of at most 1024 tokens (n_positions=1024)" in capsys.readouterr().out
