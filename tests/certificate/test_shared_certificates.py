"""Certificates that rank 0 makes for all ranks: its refusal reaches them, and they wait no longer than they must."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from hf_longctx import LongContextTrainer
from hf_longctx.certificate import Certificate
from hf_longctx.certificate import certificate as certificates
from hf_longctx.certificate.sharing import made_on_rank_0
from hf_longctx.models.traits import Traits
from tests.builders.tiny_models import tiny_general
from tests.builders.training_runs import arguments, fresh_accelerator_state
from tests.certificate.planted_certificates import GOOD, settings
from tests.worlds.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("own_cache")


class OfAllRanks(Qwen3ForCausalLM):
    """A class that only these tests certify."""


def refused_on_rank_0(folder: str) -> tuple[str, float]:
    """Make a trainer of a model that rank 0 finds wanting, and that other ranks must not test."""
    rank = torch.distributed.get_rank()
    fresh_accelerator_state()
    patch = pytest.MonkeyPatch()
    began = time.monotonic()

    def test(cls: type, config: Any, tiny: Any = None) -> Certificate:
        assert rank == 0, "rank 0 tests for all"
        return Certificate(cls.__name__, exact=False, traits=Traits(), reason="planted")

    with patch.context() as planted:
        planted.setattr(certificates, "_test", test)
        try:
            LongContextTrainer(OfAllRanks(tiny_general("qwen3").config), arguments(folder), **settings())
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


def shared() -> tuple[list[str], Certificate]:
    """Return what ranks say of results that rank 0 makes too late, fails to make, and makes for another model; and a good one."""
    rank, messages = torch.distributed.get_rank(), []

    def late() -> Certificate:
        time.sleep(0.5)
        return GOOD

    def fail() -> Certificate:
        raise MemoryError("rank 0 has none left")

    facts = {"config.hidden_size": "64"}
    other = {"config.hidden_size": str(64 + rank)}
    for make, stated, seconds in ((late, facts, 0.2), (fail, facts, 60.0), (lambda: GOOD, other, 60.0)):
        try:
            made_on_rank_0(stated, make, Certificate, seconds)
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages, made_on_rank_0(facts, lambda: replace(GOOD, seconds=float(rank)), Certificate)


@pytest.mark.processes
def test_a_refusal_of_rank_0_reaches_all_ranks(ranks2: RankPool, tmp_path: Path):
    first, second = ranks2.run(refused_on_rank_0, str(tmp_path))
    assert first[0] == second[0]
    assert first[0].startswith("ValueError: OfAllRanks is not computed exactly over layouts: planted. ")
    assert max(first[1], second[1]) < 60


@pytest.mark.processes
def test_ranks_wait_for_rank_0_no_longer_than_they_must(ranks2: RankPool):
    (first, made), (second, read) = ranks2.run(shared)
    assert first == ["", "MemoryError: rank 0 has none left", ""]
    assert second[0].startswith("TimeoutError: rank 1 has waited 0.2 s for the Certificate of rank 0")
    assert second[1].startswith(
        "RuntimeError: rank 0 could not make the Certificate for all ranks: MemoryError: rank 0"
    )
    assert second[2].startswith("ValueError: rank 1 cannot take the Certificate that rank 0 makes for all ranks")
    assert "(config.hidden_size: 65 here, 64 on rank 0)" in second[2], "at once"
    assert made == read == GOOD, "traits and all, and not made twice"


def other_models(folder: str) -> tuple[str, float]:
    """Make a trainer of a model that has another base of its RoPE on rank 1."""
    fresh_accelerator_state()
    config = tiny_general("qwen3").config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1e4 + torch.distributed.get_rank()}
    began = time.monotonic()
    patch = pytest.MonkeyPatch()
    with patch.context() as planted:
        planted.setattr(certificates, "_test", lambda cls, *args: replace(GOOD, model_class=cls.__name__, exact=False))
        try:
            LongContextTrainer(OfAllRanks(config), arguments(folder), **settings())
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


@pytest.mark.processes
def test_ranks_with_other_models_are_told_at_once_what_differs(ranks2: RankPool, tmp_path: Path):
    _, (message, seconds) = ranks2.run(other_models, str(tmp_path))
    assert message.startswith("ValueError: rank 1 cannot take the Certificate that rank 0 makes for all ranks")
    for expected in ("config.rope_parameters: ", "10001.0", "10000.0"):
        assert expected in message
    assert seconds < 60
