"""A good certificate, a process that has tested nothing yet, and a trainer's settings."""

from typing import Any

import pytest

from hf_longctx import LongContextPlugin
from hf_longctx.certificate import Certificate, as_run
from hf_longctx.certificate import certificate as certificates
from hf_longctx.models.traits import Traits
from tests.builders.training_runs import documents

GOOD = Certificate("Qwen3ForCausalLM", exact=True, traits=Traits(document_wise=("a.B",)), error=1e-15)


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has tested."""
    monkeypatch.setattr(certificates, "_CERTIFICATES", {})
    monkeypatch.setattr(as_run, "_CHECKS", {})


def settings() -> dict[str, Any]:
    """Return what a trainer is made with."""
    return {"plugin": LongContextPlugin(capacity=64), "train_dataset": documents([9, 8], labels=True)}
