"""Precision that commands show, measure and compute in."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_longctx import precision
from hf_longctx.cli import main
from hf_longctx.commands.preflight import health
from hf_longctx.commands.shared.inference_precision import InferencePrecision, inference_precision
from hf_longctx.commands.shared.loading import load_model
from hf_longctx.config import load_config
from hf_longctx.run import run as run_config
from tests.builders.small_tokenizers import word_tokenizer
from tests.builders.tiny_models import tiny_llama
from tests.builders.training.precision_runs import FASTER, SLOWER, file_of, said_by, state_with
from tests.builders.training_runs import documents, fresh_accelerator_state

CPU = torch.device("cpu")


def test_commands_that_run_here_show_both_precisions(tmp_path, measures, capsys):
    measures(SLOWER)
    both = "20 GFLOP/s a core in bfloat16 and 100 in float32"
    file = str(file_of(tmp_path))
    shown = said_by(capsys, "config", file)
    assert "# training.bf16: auto computes in float32 on this machine: a CPU with" in shown
    assert both in shown
    assert "bf16: auto" in shown
    if not torch.cuda.is_available():
        [line] = [device.text for device in health.devices() if "bf16: auto" in device.text]
        assert line.startswith("training.bf16: auto computes in float32 here: ")
        assert both in line


@pytest.mark.parametrize(("rates", "precision"), [(SLOWER, "float32"), (FASTER, "autocast")])
def test_profile_measures_the_faster_precision(rates, precision, measures, monkeypatch, capsys, tmp_path):
    from hf_longctx.commands import profile as verb
    from hf_longctx.training.measuring import rank_profile as measuring

    measures(rates)
    seen: list[str] = []

    def profile_model(config: Any, device: Any, settings: Any) -> Any:
        seen.append(settings.precision)
        return SimpleNamespace(save=lambda path: None)

    monkeypatch.setattr(measuring, "profile_model", profile_model)
    for judged in ("show", "refuse_meaningless"):  # what was measured
        monkeypatch.setattr(verb, judged, lambda *profile: None)
    for asked in ([], ["--model", str(file_of(tmp_path))], ["--precision", "auto"], ["--precision", "bfloat16"]):
        shown = said_by(capsys, "profile", "--cpu", *asked, "--threads", "1", "--output", str(tmp_path / "p.json"))
        assert "is the faster one: a CPU with" in shown
    assert seen == [precision, precision, precision, "bfloat16"]


def test_a_dry_run_decides_for_the_device_that_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(precision, "product_rates", lambda shape: pytest.fail("timed"))
    file = str(file_of(tmp_path))
    for device, computes in (("cpu-amx", "bfloat16"), ("cpu-none", "float32"), ("h100", "bfloat16")):
        shown = said_by(capsys, "train", file, "--dry-run", "--device", device, "--memory", "8")
        assert f"precision {computes} (bf16: auto; " in shown
    monkeypatch.setattr(precision, "cpu_kind", lambda: "none")
    assert "precision float32 (bf16: auto; CPUs with no instructions" in said_by(capsys, "train", file, "--dry-run")


def test_estimates_decide_for_the_device_that_is_named(capsys):
    for options, dtype in (
        (["--device", "h100"], "mixed"),
        (["--device", "cpu-none", "--memory", "8"], "float32"),
        (["--device", "cpu-amx", "--memory", "8"], "mixed"),
    ):
        shown = said_by(capsys, "estimate", "llama-7b", "--context", "1K", "--gpus", "8", *options)
        assert f"--dtype auto: {dtype}; " in shown
    assert main(["estimate", "llama-7b", "--context", "1K", "--gpus", "8", "--device", "cpu-amx"]) == 2
    assert "give --memory" in capsys.readouterr().err


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("saved_in", "runs", "rates", "weights", "autocast", "message"),
    [
        ([BF16], [None], SLOWER, "float32", False, "--dtype bfloat16 keeps them"),
        ([BF16], [None], FASTER, "auto", False, ""),
        ([BF16], [True], FASTER, "auto", True, ""),
        ([F16], [None], SLOWER, "float32", False, "--dtype float16 keeps them"),
        ([F16], [None], FASTER, "float32", True, "weights in float16 compute in bfloat16 by autocast"),
        ([F32], [None], SLOWER, "float32", False, ""),
        ([F32], [None], FASTER, "float32", True, "--dtype float32 computes in float32"),
        ([F32], [True], FASTER, "float32", True, "--dtype float32 computes in float32"),
        ([F32], [True], SLOWER, "float32", False, "--dtype mixed computes as it did"),
        ([F32], [False], None, "float32", False, ""),
        ([F32, BF16], [True, None], FASTER, "float32", True, "weights in bfloat16 and float32 compute in bfloat16"),
        ([BF16, F32], [None, False], None, "float32", False, "weights in bfloat16 compute in float32, as the other"),
        ([BF16, BF16], [None, False], FASTER, "auto", False, ""),
        ([BF16, F32], [None, None], SLOWER, "float32", False, "--dtype bfloat16 keeps them"),
    ],
)
def test_all_models_of_a_command_compute_in_one_precision(
    saved_in, runs, rates, weights, autocast, message, measures, tmp_path, capsys
):
    """The faster one, which is decided once, and none coarser than a run's."""
    asked = []
    measures(rates)
    measure = precision.product_rates
    precision.product_rates = lambda shape: asked.append(shape) or measure(shape)
    names = [str(tmp_path / str(number)) for number in range(len(saved_in))]
    for name, dtype, bf16 in zip(names, saved_in, runs):
        tiny_llama(dtype).save_pretrained(name)
        if bf16 is not None:
            (Path(name) / "trainer_state.json").write_text(state_with(bf16=bf16))
    capsys.readouterr()  # saving may have shown its progress
    chosen = inference_precision(names, "auto", CPU)
    assert (chosen.weights, chosen.autocast, len(asked)) == (weights, autocast, rates is not None)
    err = capsys.readouterr().err
    assert message in err
    assert bool(err) == bool(message)
    loaded = {load_model(name, chosen.weights, CPU).dtype for name in names}
    assert loaded == {F32 if weights == "float32" else BF16}
    for dtype in ("float32", "bfloat16", "float16"):
        assert inference_precision(names, dtype, CPU) == InferencePrecision(dtype)
    assert inference_precision(names, "mixed", CPU) == InferencePrecision("float32", autocast=True)


def evaluation_of(folder: Path, model: Path, **options: Any) -> dict[str, Any]:
    """Evaluate documents of tokens; return what evaluation.json holds."""
    from hf_longctx.commands.evaluate import Wanted, evaluate_on_rank

    given: dict[str, Any] = {"model": str(model), "against": None, "data": str(folder / "rows.jsonl"), "split": None}
    given |= {"tasks": ("length",), "lengths": (64,), "depths": 1, "trials": 1, "seed": 0, "near": 0, "capacity": None}
    evaluate_on_rank(CPU, None, Wanted(**given | {"dtype": "auto", "output": folder / "evaluation"} | options))
    return json.loads((folder / "evaluation" / "evaluation.json").read_text())


def test_two_models_differ_by_their_weights_alone(measures, tmp_path, capsys):
    """The same weights, saved in two dtypes: compared in one, the losses are the same number."""
    file_of(tmp_path)
    model = tiny_llama(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    model.float().save_pretrained(tmp_path / "run")
    for rates, computed in ((FASTER, "float32 weights, bfloat16 autocast"), (SLOWER, "float32")):
        measures(rates)
        evaluation = evaluation_of(tmp_path, tmp_path / "run", against=str(tmp_path / "base"))
        assert evaluation["difference"]["overall"]["difference"] == 0
        assert evaluation["environment"]["dtype"] == computed


def test_a_runs_model_is_evaluated_as_the_run_evaluated_it(measures, tmp_path, capsys):
    measures(FASTER)
    fresh_accelerator_state()
    trainer = run_config(load_config(file_of(tmp_path, learning_rate=0.1)))
    by_the_run = trainer.evaluate(documents([30, 7, 21, 12]))["eval_loss"]
    losses = {
        dtype: evaluation_of(tmp_path, tmp_path / "out", dtype=dtype)["loss"] for dtype in ("auto", "mixed", "float32")
    }
    checkpoint = evaluation_of(tmp_path, tmp_path / "out" / "checkpoint-1")["loss"]
    assert losses["auto"] == losses["mixed"] == checkpoint
    assert abs(losses["auto"] - by_the_run) < abs(losses["float32"] - by_the_run) / 4
    fresh_accelerator_state()
    run_config(load_config(file_of(tmp_path, learning_rate=0.1, bf16=False)))
    exact = {dtype: evaluation_of(tmp_path, tmp_path / "out", dtype=dtype)["loss"] for dtype in ("auto", "float32")}
    assert exact["auto"] == exact["float32"]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_text_is_written_in_the_precision_that_was_chosen(dtype, measures, monkeypatch, tmp_path, capsys):
    from hf_longctx.commands.generate import Wanted, generate_on_rank
    from hf_longctx.inference import score as inference

    measures(FASTER)
    tiny_llama().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    prefill, seen = inference.prefill, []

    def seen_prefill(*arguments: Any, **options: Any) -> Any:
        logits, cache = prefill(*arguments, **options)
        seen.append((torch.is_autocast_enabled("cpu"), cache.layers[0].keys.dtype))
        return logits, cache

    def seen_generate(self: Any, *arguments: Any, **options: Any) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), options["past_key_values"].layers[0].keys.dtype))
        generate(self, *arguments, **options)

    generate = LlamaForCausalLM.generate
    monkeypatch.setattr(inference, "prefill", seen_prefill)
    monkeypatch.setattr(LlamaForCausalLM, "generate", seen_generate)
    generate_on_rank(CPU, None, Wanted(str(tmp_path), "w1 w2 w3 w4", False, 4, 0.0, 0, dtype))
    assert seen == [(dtype == "auto", torch.bfloat16 if dtype == "auto" else torch.float32)] * 2
    assert capsys.readouterr().out.strip()
