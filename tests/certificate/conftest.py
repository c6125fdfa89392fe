"""Certificates on a disk of a test's own."""

from pathlib import Path
from typing import Any

import pytest

from hf_longctx.certificate import CannotShrink
from hf_longctx.certificate import certificate as certificates
from tests.certificate.planted_certificates import fresh_process


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder of certificates that a test alone writes, in a process that has tested nothing yet."""
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    fresh_process(monkeypatch)
    return tmp_path / "cache" / "certificates"


@pytest.fixture
def cannot_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any, cls: Any = None) -> Any:
        raise CannotShrink("no size is small enough")

    monkeypatch.setattr(certificates, "tiny_configuration", refuse)
