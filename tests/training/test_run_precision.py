"""`bf16: auto` in runs: all ranks and a run's later parts agree on it, and the run says so."""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, TrainingArguments

from hf_longctx import precision
from hf_longctx.checkpoint.choice import resumed
from hf_longctx.checkpoint.folder import MANIFEST, Manifest, file_entry
from hf_longctx.commands.preflight.run_memory import planned_run
from hf_longctx.config import load_config
from hf_longctx.precision import Decision, Rates, product_rates
from hf_longctx.report.training_runs.run_record import read_record
from hf_longctx.run import data_version
from hf_longctx.run import run as run_config
from hf_longctx.training.autocast import kept_precision, settle_precision
from tests.builders.tiny_models import tiny_llama
from tests.builders.training.precision_runs import FASTER, SLOWER, file_of, said_by, state_with
from tests.builders.training_runs import fresh_accelerator_state
from tests.worlds.rank_pool import RankPool

CPU = torch.device("cpu")


def _settled(folder: str, rates: list[Rates]) -> tuple[bool, str, str]:
    """Each rank would measure something else."""
    fresh_accelerator_state()
    args = TrainingArguments(folder, use_cpu=True, report_to=[])
    own = rates[args.process_index]
    precision.product_rates = lambda shape: own
    try:
        decision = settle_precision(args, tiny_llama())
    finally:
        precision.product_rates = product_rates
    return args.bf16, args.mixed_precision, decision.reason


@pytest.mark.parametrize("rates", [[FASTER, SLOWER], [SLOWER, FASTER]])
def test_ranks_decide_alike_though_their_clocks_disagree(rates, ranks2: RankPool, tmp_path):
    first, second = ranks2.run(_settled, str(tmp_path), rates)
    assert first == second
    assert first[:2] == ((True, "bf16") if rates[0] is FASTER else (False, "no"))


def test_a_run_says_its_precision_keeps_it_and_goes_on_with_it(tmp_path, measures, capsys, monkeypatch):
    """Decided once, as float32; resumed where bfloat16 is the faster one."""
    measures(SLOWER)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # what a launcher's file says does not count
    fresh_accelerator_state()
    trainer = run_config(load_config(file_of(tmp_path)))
    assert (trainer.args.bf16, trainer.accelerator.mixed_precision) == (False, "no")
    assert capsys.readouterr().out.count("Precision (bf16: auto): float32: a CPU with") == 1
    assert "20 GFLOP/s a core in bfloat16 and 100 in float32" in read_record(tmp_path / "out")["training"]["precision"]
    assert "(auto: float32: " in (tmp_path / "out" / "README.md").read_text()

    measures(FASTER)
    fresh_accelerator_state()
    resumed = run_config(load_config(file_of(tmp_path, max_steps=2, resume_from_checkpoint="auto")))
    assert (resumed.args.bf16, resumed.state.global_step) == (False, 2)
    assert "Precision (bf16: auto): float32: checkpoint-1 was trained so" in capsys.readouterr().out

    fresh_accelerator_state()
    other = file_of(tmp_path, max_steps=3, resume_from_checkpoint=True, bf16=True)
    with pytest.raises(ValueError, match=r"bf16=True, but .* bf16=False.* Valid: training.bf16: false or auto"):
        run_config(load_config(other))

    fresh_accelerator_state()
    anew = run_config(load_config(file_of(tmp_path, output_dir=str(tmp_path / "new"), resume_from_checkpoint="auto")))
    assert anew.args.bf16
    assert read_record(tmp_path / "new")["training"]["autocast"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_compute_in_half_precision_where_float32_would_be_faster(dtype):
    slow, fast, kept = Decision(False, "why"), Decision(True, "why"), Decision(False, "was so", kept=True)
    assert str(slow.over(dtype)) == f"{dtype}: the weights are {dtype}, and no autocast is on: why"
    assert str(fast.over(dtype)) == "bfloat16: why"
    assert (kept.over(dtype).computes, kept.over(dtype).bf16, kept.over(dtype).kept) == (dtype, False, True)
    assert slow.over("float32") == slow


def test_a_dry_run_counts_with_what_auto_comes_to_whatever_the_launcher_says(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    decided = load_config(file_of(tmp_path, bf16=False))
    chosen, auto = planned_run(decided, 1), planned_run(decided, 1, precision=Decision(False, "why"))
    assert (chosen.arguments.bf16, auto.arguments.bf16) == (True, False)


def test_a_run_on_half_precision_weights_says_what_it_computes_in(tmp_path, measures, capsys):
    measures(SLOWER)
    file, in_half = file_of(tmp_path), "model.dtype=bfloat16"
    reason = "the weights are bfloat16, and no autocast is on: "
    assert f"# training.bf16: auto computes in bfloat16 on this machine: {reason}" in said_by(
        capsys, "config", str(file), in_half
    )
    dry = said_by(capsys, "train", str(file), in_half, "--dry-run", "--device", "cpu-none", "--memory", "8")
    assert f"precision bfloat16 (bf16: auto; {reason}CPUs with no instructions" in dry
    fresh_accelerator_state()
    trainer = run_config(load_config(file, [in_half]))
    assert (trainer.args.bf16, next(trainer.model.parameters()).dtype) == (False, torch.bfloat16)
    assert f"Precision (bf16: auto): bfloat16: {reason}a CPU with" in capsys.readouterr().out
    assert read_record(tmp_path / "out")["training"]["precision"].startswith(f"bfloat16: {reason}")
    assert "(auto: bfloat16: the weights are" in (tmp_path / "out" / "README.md").read_text()


def checkpoint_of(folder: Path, step: int, state: str, optimizer: bool = True) -> Path:
    """A checkpoint of one file, whole, or without an optimizer."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "weights").write_text("some")
    with suppress(ValueError):
        state = json.dumps(json.loads(state) | {"global_step": step})
    (checkpoint / "trainer_state.json").write_text(state)
    manifest = Manifest(
        step=step, serial=step, world_size=1, sharding="ddp", files={"weights": file_entry(checkpoint / "weights")},
        weights={}, optimizer={} if optimizer else None,
    )  # fmt: skip
    (checkpoint / MANIFEST).write_text(manifest.text())
    return checkpoint


def test_a_checkpoint_without_a_precision_decides_nothing(tmp_path):
    for content in ("{", '{"stateful_callbacks": {}}', '{"stateful_callbacks": {"RunState": {"args": {"seed": 1}}}}'):
        checkpoint = checkpoint_of(tmp_path, 1, content)
        for asked in ("auto", str(checkpoint)):
            assert kept_precision(asked, tmp_path) is None
    checkpoint = checkpoint_of(tmp_path, 1, state_with(bf16=True))
    for asked in (True, "auto", str(checkpoint)):
        assert kept_precision(asked, tmp_path) == Decision(True, "checkpoint-1 was trained so", kept=True)
    assert kept_precision(None, tmp_path) is None


@pytest.mark.parametrize("damage", ["a file is missing", "no optimizer", "no manifest"])
def test_what_a_run_keeps_is_of_the_checkpoint_that_it_goes_on_from(damage, tmp_path):
    """The newest one can be read, and training would pass it over."""
    checkpoint_of(tmp_path, 1, state_with(bf16=False, data_version=1))
    newest = checkpoint_of(tmp_path, 2, state_with(bf16=True, data_version=2), optimizer=damage != "no optimizer")
    if damage == "a file is missing":
        (newest / "weights").unlink()
    elif damage == "no manifest":
        (newest / MANIFEST).unlink()
    for asked in (True, "auto"):
        assert kept_precision(asked, tmp_path) == Decision(False, "checkpoint-1 was trained so", kept=True)
        assert resumed(asked, tmp_path) == tmp_path / "checkpoint-1"
    arguments: Any = SimpleNamespace(resume_from_checkpoint="auto", output_dir=str(tmp_path), process_index=1)
    assert data_version(load_config(file_of(tmp_path)), arguments) == 1


@pytest.mark.parametrize(
    ("rates", "settings", "dtype", "parts"),
    [
        (SLOWER, {"bf16": True}, torch.float32, ["in bfloat16 (bf16=True)", "5.0 times", "bf16=False)", "bf16: auto"]),
        (FASTER, {}, torch.float32, ["in float32 (bf16=False)", "3.0 times", "TrainingArguments(bf16=True)"]),
        (SLOWER, {}, torch.bfloat16, ["the weights are bfloat16", "model.dtype: float32"]),
        (Rates(1e11, 1.4e11), {"bf16": True}, torch.float32, []),
        (FASTER, {"bf16": True}, torch.float32, []),
    ],
)
def test_a_choice_that_is_much_slower_is_said_once(rates, settings, dtype, parts, measures, tmp_path, caplog):
    from hf_longctx.training import autocast

    measures(rates)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **settings)
    model: Any = torch.nn.Linear(4, 4, dtype=dtype)
    model.config = LlamaConfig(hidden_size=512, intermediate_size=1024)
    autocast.say_if_much_slower(args, model, None)
    if dtype is torch.float32:  # nobody chose it, it was timed just now
        autocast.say_if_much_slower(args, model, Decision(args.bf16, "timed"))
    warnings = [record.getMessage() for record in caplog.records if "times as slow" in record.getMessage()]
    assert len(warnings) == bool(parts)
    assert all(part in warnings[0] for part in parts)
    if parts and dtype is torch.bfloat16:
        autocast.say_if_much_slower(args, model, Decision(False, "was so", kept=True))
        assert "Faster: a new run, with weights in float32 (model.dtype: float32)" in caplog.records[-1].getMessage()


def test_small_models_and_other_devices_are_not_measured(measures, monkeypatch, tmp_path):
    from hf_longctx.training import autocast

    monkeypatch.setattr(autocast, "product_rates", lambda shape: pytest.fail("timed"))
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], bf16=True)
    autocast.say_if_much_slower(args, tiny_llama(), None)
    elsewhere: Any = SimpleNamespace(process_index=0, device=torch.device("cuda"), fp16=False, bf16=True)
    autocast.say_if_much_slower(elsewhere, tiny_llama(), None)
