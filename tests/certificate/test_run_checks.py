"""Checks of a tiny copy in the precision and with the kernel of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hf_longctx import LongContextTrainer, patch_model
from hf_longctx.certificate import Certificate, Conditions, as_run, run_check
from hf_longctx.certificate import certificate as certificates
from hf_longctx.models import attention
from tests.builders.tiny_models import tiny_general, tiny_llama
from tests.builders.training_runs import arguments, fresh_accelerator_state
from tests.certificate.planted_certificates import GOOD, fresh_process, settings

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_copy_runs_as_the_model_will(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(tiny_general("qwen3"))
    for conditions in (
        Conditions("cpu", "float32"),
        Conditions("cpu", "float32", "bfloat16"),
        Conditions("cpu", "bfloat16"),
    ):
        check = run_check(model, conditions)
        assert check.verdict == "within", check.reason
        assert check.bound >= as_run.MULTIPLE * as_run.LEAST_EPS * conditions.eps
    fresh_process(monkeypatch)
    monkeypatch.setattr(as_run, "new_run_check", None)
    assert run_check(model, conditions) == check, "from disk"


def test_a_device_is_asked_for_its_name_once(monkeypatch: pytest.MonkeyPatch):
    """The name of a GPU is no device that torch could be asked about."""
    names = {"cpu": "Processor", "cpu:0": "Processor"}
    monkeypatch.setattr(as_run, "_device_name", names.__getitem__)
    check = run_check(patch_model(tiny_general("qwen3")), Conditions("cpu:0", "float32"))
    assert check.verdict == "within", check.reason
    assert check.conditions.startswith("Processor, float32")


def test_a_fault_in_the_runs_precision_refuses_the_run(monkeypatch: pytest.MonkeyPatch):
    """Return which float64 does not show."""
    model, own = patch_model(tiny_general("qwen3")), attention._over_layout

    def lossy(module: Any, tensors: Any, *args: Any, scale: float | None, **features: Any) -> Any:
        return own(
            module, tensors, *args, scale=scale if torch.is_autocast_enabled("cpu") is False else 0.1, **features
        )

    monkeypatch.setattr(attention, "_over_layout", lossy)
    assert run_check(model, Conditions("cpu", "float32")).verdict == "within"
    with pytest.raises(
        ValueError, match=r"as run \(cpu, bfloat16 autocast over float32, kernel auto\): differs: the gradient"
    ):
        run_check(model, Conditions("cpu", "float32", "bfloat16"))


def test_what_a_copy_cannot_show_is_said_to_be_uncovered(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(tiny_general("qwen3"))
    for_gpus = run_check(model, Conditions("cpu", "bfloat16", kernel="flash_attn_2"))
    assert for_gpus.verdict == "not covered"
    assert "the copy's heads do not suit the kernel" in str(for_gpus)
    monkeypatch.setattr(as_run, "LARGEST_BOUND", 1e-9)
    rounded = run_check(model, Conditions("cpu", "float32"))
    assert rounded.verdict == "not covered"
    assert "the plain model itself rounds so much" in rounded.reason


def test_what_fails_over_layouts_alone_is_a_fault_and_refuses_the_run(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(tiny_general("qwen3"))

    def fail(*args: Any, **features: Any) -> Any:
        raise TypeError("planted")

    monkeypatch.setattr(attention, "_over_layout", fail)
    with pytest.raises(
        RuntimeError, match=r"copy of Qwen3ForCausalLM fails over a layout \(cpu, float32.*TypeError: planted"
    ):
        run_check(model, Conditions("cpu", "float32"))


def test_a_precision_that_the_plain_model_does_not_have_is_not_covered(monkeypatch: pytest.MonkeyPatch):
    model, own = patch_model(tiny_general("qwen3")), Qwen3MLP.forward

    def in_wider_ones(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == torch.bfloat16:
            raise RuntimeError("no kernel of this dtype")
        return own(module, hidden)

    monkeypatch.setattr(Qwen3MLP, "forward", in_wider_ones)
    check = run_check(model, Conditions("cpu", "bfloat16"))
    assert (check.verdict, check.reason) == (
        "not covered",
        "the plain copy does not run so either: RuntimeError: no kernel of this dtype",
    )


def test_a_copy_takes_the_kernel_of_the_models_heads(monkeypatch: pytest.MonkeyPatch):
    class Chosen:
        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch.setattr(as_run, "select_kernel", lambda call: Chosen("wide" if call.q.shape[-1] > 64 else "narrow"))
    wide, narrow = tiny_general("qwen3", head_dim=128).config, tiny_general("qwen3").config
    on_cpu = Conditions("cpu", "float32")
    assert as_run._kernel(wide, narrow, on_cpu) == "wide"
    assert as_run._kernel(narrow, narrow, on_cpu) == "auto"
    assert as_run._kernel(wide, narrow, replace(on_cpu, kernel="narrow")) == "narrow"


def test_a_trainer_knows_what_its_model_was_certified_for(tmp_path: Path):
    for model, expected in (
        (tiny_general("qwen3"), "exact over layouts: largest difference "),
        (tiny_llama(), "exact over layouts: largest difference "),
    ):
        fresh_accelerator_state()
        trainer = LongContextTrainer(model, arguments(str(tmp_path), bf16=True), **settings())
        assert trainer.certificate.startswith(expected)
        as_it_runs = "as run (cpu, bfloat16 autocast over float32, kernel auto): "
        assert as_it_runs in trainer.certificate


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (replace(GOOD, exact=False, reason="planted"), "is not computed exactly over layouts: planted"),
        (
            replace(GOOD, exact=False, tested=False, reason="planted"),
            "LlamaForCausalLM is tested by the suite of hf_longctx, and could not be tested here: planted",
        ),
    ],
    ids=["differs", "not tested"],
)
def test_a_model_with_attention_of_ours_is_tested_before_it_trains(
    result: Certificate, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Its code is transformers' as much as ours, and another release may differ."""
    monkeypatch.setattr(certificates, "_test", lambda *args: result)
    fresh_accelerator_state()
    if result.tested:
        with pytest.raises(ValueError, match=message):
            LongContextTrainer(tiny_llama(), arguments(str(tmp_path)), **settings())
    else:
        assert LongContextTrainer(tiny_llama(), arguments(str(tmp_path)), **settings()).certificate == message
