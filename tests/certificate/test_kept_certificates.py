"""Certificates on disk: kept until a class, its configuration or code changes."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from hf_longctx.attention.kernels import accumulate
from hf_longctx.certificate import Certificate, certificate_of
from hf_longctx.certificate import certificate as certificates
from hf_longctx.certificate import kept_certificates as cache
from hf_longctx.models import attention
from tests.builders.tiny_models import tiny_general
from tests.certificate.planted_certificates import GOOD, fresh_process

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes that are tested, each with a good result."""
    names: list[str] = []

    def test(cls: type, config: Any, tiny: Any = None) -> Certificate:
        names.append(cls.__name__)
        return GOOD

    monkeypatch.setattr(certificates, "_test", test)
    return names


def test_a_certificate_is_kept_on_disk(tested: list[str], monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    model = tiny_general("qwen3")
    first = certificate_of(model)
    fresh_process(monkeypatch)
    assert certificate_of(model) == first
    model.config._name_or_path, model.config.dtype = "elsewhere", torch.bfloat16
    fresh_process(monkeypatch)
    assert certificate_of(model) == first
    assert len(tested) == 1
    assert len(list(own_cache.iterdir())) == 1, "nothing half-written is left"


@pytest.mark.parametrize(
    "content", ["", '{"exact": tru', "[]", '{"exact": true}', "null", '{"model_class": 3}', "[" * 9999]
)
def test_a_corrupt_file_is_ignored_and_written_anew(content: str, tested: list[str], monkeypatch: Any, own_cache: Path):
    model = tiny_general("qwen3")
    first = certificate_of(model)
    (file,) = own_cache.iterdir()
    right = file.read_text()
    file.write_text(content)
    fresh_process(monkeypatch)
    assert certificate_of(model) == first
    assert len(tested) == 2
    assert json.loads(file.read_text()).keys() == json.loads(right).keys()


def test_a_folder_that_cannot_be_written_keeps_nothing(tested: list[str], own_cache: Path):
    own_cache.parent.write_text("a file in the place of the folder")
    assert certificate_of(tiny_general("qwen3")).exact


@pytest.mark.parametrize("result", [replace(GOOD, exact=False), replace(GOOD, exact=False, tested=False)])
def test_what_is_refused_is_tested_again(result: Certificate, monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    # What was missing may be there then.
    monkeypatch.setattr(certificates, "_test", lambda *args: result)
    assert not certificate_of(tiny_general("qwen3")).exact
    assert not own_cache.exists()


def test_the_key_changes_with_class_configuration_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = "from transformers import Qwen3ForCausalLM\nclass Mine(Qwen3ForCausalLM):\n    scale = {}\n"
    (tmp_path / "modeling_mine.py").write_text(source.format(1))
    (tmp_path / "parts_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    cls, config = importlib.import_module("modeling_mine").Mine, tiny_general("qwen3").config

    def key() -> str:
        cache._hash_of_files.cache_clear()  # as in another process
        return cache.key_of(cls, config)

    keys = [key()]
    assert keys == [key()]
    keys.append(cache.key_of(Qwen3ForCausalLM, config))
    (tmp_path / "modeling_mine.py").write_text(source.format(2))
    keys.append(key())
    (tmp_path / "parts_of_mine.py").write_text("imported = 1")
    keys.append(key())
    config.rms_norm_eps = 1e-5
    keys.append(key())
    monkeypatch.setattr(cache, "version", lambda package: "0")
    keys.append(key())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cache, "PACKAGE", tmp_path)
        keys.append(key())
    with monkeypatch.context() as planted:
        planted.setattr(attention, "_over_layout", lambda *args, **features: None)
        keys.append(key())
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", lambda *args: None)
    keys.append(key())
    del sys.modules["modeling_mine"].__file__
    keys.append(key())
    del sys.modules["modeling_mine"]
    assert len(set(keys)) == len(keys) == 10


def test_the_key_stays_when_code_is_compiled():
    """Dynamo writes what it compiled into the globals of the module, under a name that no other process has."""
    config = tiny_general("qwen3").config
    before, names = cache.key_of(Qwen3ForCausalLM, config), set(vars(accumulate))
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    torch.compile(accumulate.merge_, backend="eager")(out, lse, accumulate.Partial(0, 3, out + 1, lse.clone()))
    assert any(name.startswith(cache.COMPILED) for name in set(vars(accumulate)) - names)
    assert cache.key_of(Qwen3ForCausalLM, config) == before
