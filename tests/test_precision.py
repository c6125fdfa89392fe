"""`bf16: auto`: what it comes to on which device, that all ranks and a run's later parts agree on it, and who says so."""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_longctx import precision
from hf_longctx.checkpoint.choice import resumed
from hf_longctx.checkpoint.folder import MANIFEST, Manifest, file_entry
from hf_longctx.cli import main
from hf_longctx.commands.preflight import health
from hf_longctx.commands.preflight.run_memory import planned_run
from hf_longctx.commands.shared.costs import read_device
from hf_longctx.commands.shared.inference_precision import InferencePrecision, inference_precision
from hf_longctx.commands.shared.loading import load_model
from hf_longctx.config import ConfigError, load_config
from hf_longctx.hardware.speeds import CPU_CORES
from hf_longctx.precision import Decision, Rates, cpu_kind, decide_for, decide_here, product_rates, with_precision
from hf_longctx.report.training_runs.run_record import read_record
from hf_longctx.run import _data_version
from hf_longctx.run import run as run_config
from hf_longctx.training.autocast import kept_precision, settle_precision
from hf_longctx.training.measuring.step_costs import cost_model
from tests.builders.config_files import ROOT
from tests.builders.small_tokenizers import word_tokenizer
from tests.builders.tiny_models import TINY, tiny_llama
from tests.builders.training_runs import documents, fresh_accelerator_state
from tests.worlds.rank_pool import RankPool

CPU = torch.device("cpu")
FLAGS = {
    "amx": "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile",
    "avx512_bf16": "flags\t\t: fpu avx2 avx512f avx512_bf16",
    "avx512": "flags\t\t: fpu avx2 avx512f avx512bw",
    "none": "flags\t\t: fpu avx2",
}
FASTER, TIE, SLOWER = Rates(3e11, 1e11), Rates(1.14e11, 1e11), Rates(2e10, 1e11)


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what this process's products would be measured at."""
    return lambda rates: [
        monkeypatch.setattr(f"hf_longctx.{name}.product_rates", lambda shape: rates)
        for name in ("precision", "training.autocast")
    ]


@pytest.mark.parametrize(
    ("has", "environ", "kind"),
    [
        ("amx", {}, "amx"),
        ("amx", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx512_bf16"),
        ("amx", {"ONEDNN_MAX_CPU_ISA": "avx512_core_amx"}, "amx"),
        ("amx", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}, "avx512_bf16"),
        ("amx", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "none"),
        ("amx", {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "avx512"),
        ("amx", {"ONEDNN_MAX_CPU_ISA": "ALL", "ATEN_CPU_CAPABILITY": "avx2"}, "amx"),
        ("avx512_bf16", {}, "avx512_bf16"),
        ("avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "avx512_bf16"),
        ("avx512", {}, "avx512"),
        ("avx512", {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, "none"),
        ("none", {}, "none"),
        ("none", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "none"),
    ],
)
def test_flags_and_masks_say_what_a_cpu_has(has, environ, kind):
    assert cpu_kind(f"processor\t: 0\n{FLAGS[has]}\nbugs\t: none\n", environ) == kind


def test_a_cpu_without_flags_has_nothing():
    assert cpu_kind("Features\t: asimd\n", {}) == cpu_kind("", {}) == "none"


@pytest.mark.parametrize(
    ("rates", "bf16"), [(FASTER, True), (Rates(1.15e11, 1e11), True), (TIE, False), (SLOWER, False)]
)
def test_timed_products_decide_on_a_cpu(rates, bf16):
    asked = []
    decision = decide_here(CPU, (4, 5, 6), lambda shape: asked.append(shape) or rates)
    assert (decision.bf16, asked) == (bf16, [(4, 5, 6)])
    for rate in rates:
        assert f"{rate / 1e9:.3g}" in decision.reason
    assert str(decision).startswith("bfloat16: " if bf16 else "float32: ")


@pytest.mark.parametrize(("capability", "bf16"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_the_capability_decides_on_cuda(capability, bf16, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    decision = decide_here(torch.device("cuda", 0), rates_of=lambda shape: pytest.fail("timed"))
    assert (decision.bf16, "Some GPU has compute capability {}.{}".format(*capability) in decision.reason) == (
        bf16,
        True,
    )


def test_rates_are_those_of_the_fastest_products_and_draw_no_random_number():
    """bfloat16 products take 3 ticks, float32 ones 1, and most are disturbed; the first load kernels, and do not count."""
    ticks, now = iter([2, 0.5, 3, 1, 30, 10, 300, 10, 3, 100, 40, 20]), [0.0, 0]

    def clock() -> float:
        assert torch.get_num_threads() == 1
        if now[1] % 2:
            now[0] += next(ticks)
        now[1] += 1
        return now[0]

    before = torch.get_rng_state()
    torch.set_num_threads(2)
    rates = product_rates((64, 384, 768), clock)
    assert torch.get_num_threads() == 2
    assert rates.ratio == pytest.approx(1 / 3)
    assert rates.float32 == 6 * 64 * 384 * 768
    assert torch.equal(before, torch.get_rng_state())


def test_a_device_is_decided_by_its_name_without_timing(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "product_rates", lambda shape: pytest.fail("timed"))
    for kind in CPU_CORES:
        assert decide_for(f"cpu-{kind}").bf16 == (kind == "amx")
        assert read_device(f"cpu-{kind}").speed is CPU_CORES[kind]["bfloat16" if kind == "amx" else "float32"]
        monkeypatch.setattr(precision, "cpu_kind", lambda kind=kind: kind)
        assert decide_for("cpu") == decide_for(f"cpu-{kind}")
    assert decide_for("h100").bf16


def test_steps_on_each_kind_of_cpu_are_predicted_in_the_right_order():
    """Measured: SmolLM2-135M with AMX 393 against 101 tokens/s, without 20 to 43 against 63 to 88."""
    from hf_longctx.planner import CostModel, Topology
    from hf_longctx.settings.longctx import LongContextPlugin

    plugin, model = LongContextPlugin(capacity=2048), tiny_llama()
    costs = {
        (kind, half): cost_model(plugin, model, Topology(1, 2048), CPU, autocast=half, cpu=kind)
        for kind in CPU_CORES
        for half in (True, False)
    }
    assert all(isinstance(cost, CostModel) for cost in costs.values())
    faster = {kind: costs[kind, True].linear_ps < costs[kind, False].linear_ps for kind in CPU_CORES}
    assert faster == {"amx": True, "avx512_bf16": False, "avx512": False, "none": False}


# YAML


def file_of(folder: Path, **training: Any) -> Path:
    rows = [{"input_ids": row["input_ids"]} for row in documents([30, 7, 21, 12])]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"output_dir": str(folder / "out"), "use_cpu": True, "report_to": [], "bf16": "auto", "max_steps": 1}
    content = {
        "model": {"random_init": {"model_type": "llama"} | sizes | heads},
        "data": {"path": str(folder / "rows.jsonl")},
        "longctx": {"capacity": 64, "global_batch_documents": 2},
        "training": given | {"save_strategy": "steps", "save_steps": 1, "disable_tqdm": True} | training,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return folder / "run.yaml"


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_yaml_takes_auto_true_and_false(value, tmp_path):
    assert load_config(file_of(tmp_path, bf16=value)).training["bf16"] is value or value == "auto"


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"bf16": "automatic"}, "training.bf16: .* or must be 'auto', got 'automatic'"),
        ({"fp16": "auto", "bf16": False}, "training.fp16: must be a valid boolean.*got 'auto'"),
        ({"fp16": True}, "training.fp16: true beside bf16: auto; keep one"),
    ],
)
def test_yaml_refuses_other_words(training, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_config(file_of(tmp_path, **training))


def test_shipped_cpu_configurations_leave_it_open():
    settings = {path.name: yaml.safe_load(path.read_text())["training"] for path in ROOT.glob("configs/*.yaml")}
    on_cpu = {name: training["bf16"] for name, training in settings.items() if training.get("use_cpu")}
    assert set(on_cpu) == {"quickstart.yaml", "chat.yaml", "lora.yaml", "tiny.yaml"}
    assert set(on_cpu.values()) == {"auto"}


def test_a_section_is_resolved_once():
    assert with_precision({"bf16": True}, lambda: pytest.fail("decided")) == ({"bf16": True}, None)
    assert with_precision({"seed": 1}, lambda: pytest.fail("decided")) == ({"seed": 1}, None)
    decision = Decision(True, "why")
    assert with_precision({"bf16": "auto", "seed": 1}, lambda: decision) == ({"bf16": True, "seed": 1}, decision)


# Runs


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


def state_with(**fields: Any) -> str:
    return json.dumps({"stateful_callbacks": {"RunState": {"args": fields}}})


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
    assert _data_version(load_config(file_of(tmp_path)), arguments) == 1


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


# Commands


def said_by(capsys: Any, *arguments: str) -> str:
    fresh_accelerator_state()
    assert main(list(arguments)) == 0, capsys.readouterr()
    return capsys.readouterr().out


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
    monkeypatch.setattr(verb, "show", lambda profile: None)
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


# Evaluation and generation


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
