"""`hf-longctx train`: what a dry run says is what training does, ranks that are started here, and one voice where ranks fail."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from hf_longctx import LongContextPlugin, LongContextTrainer, precision
from hf_longctx.cli import main
from hf_longctx.commands.preflight import launching
from hf_longctx.commands.preflight.launching import LAUNCHER, _end_ranks, _environment, _failed_first
from hf_longctx.commands.preflight.run_memory import planned_run
from hf_longctx.commands.shared import ranks
from hf_longctx.config import load_config
from hf_longctx.hardware.profile import Profile
from hf_longctx.hardware.speeds import CPU_CORES, RankSpeed
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.planner import CostModel
from hf_longctx.precision import cpu_core, cpu_kind
from hf_longctx.training.memory import capacity
from hf_longctx.training.memory.capacity import memory_model
from tests.builders.tiny_models import TINY, tiny_llama
from tests.builders.training_runs import documents, fresh_accelerator_state
from tests.worlds.launched import ROOT, run, torchrun
from tests.worlds.patience import PATIENCE
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """configs/tiny.yaml with documents of its own."""
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents(LENGTHS)))
    settings = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    settings["model"]["random_init"]["vocab_size"] = TINY["vocab_size"]
    settings["data"] = {"path": str(tmp_path / "documents.jsonl")}
    settings["longctx"] = {"capacity": 110, "global_batch_documents": 6}
    settings["training"] |= {"output_dir": str(tmp_path / "out"), "max_steps": 1, "save_strategy": "no"}
    settings["training"]["bf16"] = False  # the same on every CPU
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "run.yaml"


def shown(capsys: Any, *arguments: Any, code: int = 0) -> str:
    fresh_accelerator_state()
    assert main(["train", *map(str, arguments)]) == code, capsys.readouterr()
    printed = capsys.readouterr()
    return printed.out if code in (0, 1) else printed.err


# Dry runs


def test_a_dry_run_shows_the_plan_that_training_makes(file: Path, capsys):
    text = shown(capsys, file, "--dry-run", "--ranks", "2")
    assert not (file.parent / "out").exists()
    chosen = load_config(file)
    fresh_accelerator_state()
    trainer = LongContextTrainer(
        tiny_llama(**chosen.model.random_init or {}),
        TrainingArguments(**chosen.training),
        train_dataset=documents(LENGTHS),
        plugin=LongContextPlugin(capacity=220, global_batch_documents=6),
    )
    one = trainer.training_steps()
    assert f"12 of data.train; {one.steps(0)} optimizer steps an epoch" in text
    same_documents = str(one.plan(0, 0).summary()).partition(" documents")[0]
    assert re.search(rf"^{same_documents} documents \(.*on 2 ranks$", text, re.MULTILINE)
    assert "sharding  ddp (auto: no FSDP settings)" in text
    assert "capacity  110 tokens" in text
    assert f"\n  hf-longctx train {file} --ranks 2\n" in text
    assert "\nfits: " in text


def test_a_dry_run_describes_the_stages_of_a_pipeline(file: Path, capsys):
    staged = ("longctx.pipeline_stages=2", "longctx.capacity=400", "--dry-run", "--ranks", "2")
    text = shown(capsys, file, *staged)
    assert re.search(r"pipeline  2 stages of 1 rank\(s\), 1f1b; layers 1 \+ 1, which cost \d+ % \+ \d+ %", text)
    assert "tokens on 1 ranks of 2 stages each" in text
    assert re.search(r"Memory of a process of a stage, full \(\d+\)", text)
    text = shown(capsys, file, *staged, "longctx.pipeline_schedule=gpipe", "--memory", "1e-5", code=1)
    assert "counted as 1f1b holds activations; gpipe holds those of all micro-batches" in text
    assert "Valid: more pipeline_stages, sharding zero1, or model.lora" in text


@pytest.mark.parametrize(
    ("settings", "sharding", "why"),
    [
        (["longctx.sharding=zero1"], "zero1", "longctx.sharding is 'zero1'"),
        (["training.fsdp=true"], "zero3", "auto: FSDP settings"),
        (["training.fsdp=true", "training.fsdp_config={reshard_after_forward: false}"], "zero2", "auto: FSDP settings"),
        ([], "ddp", "auto: no FSDP settings"),
    ],
)
def test_a_dry_run_says_what_auto_chose(settings, sharding, why, file, capsys):
    assert f"sharding  {sharding} ({why})" in shown(capsys, file, *settings, "--dry-run", "--ranks", "4")


@pytest.mark.parametrize("sharding", [pytest.param("ddp", marks=pytest.mark.nightly), "zero3"])
def test_a_traced_dry_run_counts_on_to_all_layers(sharding: str, file: Path, capsys):
    settings = ("model.random_init.num_hidden_layers=9", f"longctx.sharding={sharding}", "training.use_cpu=false")
    text = shown(capsys, file, *settings, "--dry-run", "--trace", "--device", "h100", "--ranks", "4")
    assert "with 3 of 9 layers, of 1 kind(s), with one more of each, and with 5" in text
    off = re.search(r"checked   5 layers were traced too: counted on, they are ([+-][\d.]+)% of that", text)
    assert abs(float(off[1])) < 1, text
    assert re.search(
        r"^messages  [\d,]+ to [123] ranks: [\d.]+ GiB inside the node, 0.00 between nodes", text, re.MULTILINE
    )
    assert "host      reads no value inside the micro-batch" in text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["--device", "cpu"], "processes on processors: name a GPU with --device"),
        (["training.use_cpu=false", "--device", "h100", "longctx.pipeline_stages=2"], "2 stages of a pipeline"),
        (
            ["training.use_cpu=false", "--device", "h100"],
            "2 of 2 layers, of 1 kind(s), would be run at a time. Valid: 5 layers of one kind or more",
        ),
    ],
)
def test_a_run_that_cannot_be_traced_is_refused(settings, reason, file, capsys):
    assert reason in shown(capsys, file, *settings, "--dry-run", "--trace", "--ranks", "2", code=2)


def test_each_node_has_its_command_and_memory_that_does_not_suffice_is_said(file, capsys):
    options = ("--dry-run", "--ranks", "16", "--nodes", "2", "--device", "a100")
    text = shown(capsys, file, "longctx.ulysses_degree=2", *options)
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500" in text
    assert f"-m hf_longctx train {file} longctx.ulysses_degree=2" in text
    text = shown(capsys, file, *options, "--memory", "0.001", code=1)
    assert "does not fit: " in text
    assert "Valid: more ranks with sharding zero3, or model.lora" in text


def test_a_dry_run_plans_with_the_speeds_of_the_device_that_is_named(file, capsys, monkeypatch):
    """Processors', or those that a profile holds, also where the file says nothing of CPUs."""
    seen: list[RankSpeed] = []
    from_config = CostModel.from_config

    def seen_from_config(config: Any, speed: RankSpeed, **options: Any) -> CostModel:
        seen.append(speed)
        return from_config(config, speed, **options)

    monkeypatch.setattr(CostModel, "from_config", seen_from_config)
    measured = Profile(
        speed=replace(cpu_core("none", bf16=False), linear_flops=1.5e9), points=(), predicted_seconds=(), clock="wall",
        device="some", backend="none", world_size=1, ranks_per_node=1, threads=1, precision="float32", device_bytes=2**30,
        host_bytes=2**30, model={}, versions={},
    )  # fmt: skip
    measured.save(profile := file.parent / "measured.json")
    for device, speed in (
        ("cpu", cpu_core(cpu_kind(), bf16=False)),
        ("cpu-avx512", cpu_core("avx512", bf16=False)),
        (profile, measured.speed),
    ):
        options = ("training.use_cpu=false", "--dry-run", "--ranks", "2", "--device", device, "--memory", "1")
        text = shown(capsys, file, *options)
        assert seen == [speed]
        assert (f"speeds    as measured in {device}" in text) == (device == profile)
        seen.clear()


def test_a_configuration_for_processors_is_shown_on_the_gpu_that_is_named(file, capsys):
    """Speeds, memory, precision and the command: as if it were none for processors, which it says."""
    options = ("training.bf16=auto", "--dry-run", "--ranks", "2", "--device", "h100")
    assert load_config(file).training["use_cpu"]
    lines = shown(capsys, file, *options).splitlines(keepends=True)
    assert lines.pop(1) == "device    h100, which is no processor: shown as with training.use_cpu=false\n"
    assert "".join(lines) == shown(capsys, file, options[0], "training.use_cpu=false", *options[1:])
    assert "speeds    planned with the speeds of h100\n" in lines
    assert f"  hf-longctx train {file} training.bf16=auto training.use_cpu=false --ranks 2\n" in lines


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["longctx.ulysses_degree=3", "--dry-run"], ["ulysses_degree=3", "Valid degrees: [1, 2, 4, 8]"]),
        (
            ["longctx.capacity=20", "--dry-run", "--ranks", "2"],
            ["200 tokens", "2 ranks * 20 tokens", "Valid: capacity"],
        ),
        (["--dry-run", "--ranks", "3", "--nodes", "2"], ["--ranks 3 must be a multiple of --nodes 2"]),
        (["--nodes", "2"], ["--nodes is for --dry-run"]),
        (["model.freeze=[model.layer]", "--dry-run"], ["'model.layer' matches no parameter"]),
        (["model.path=no/such", "model.random_init=null", "--dry-run"], ["no/such"]),
    ],
)
def test_what_training_would_refuse_a_dry_run_refuses(arguments, parts, file, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = shown(capsys, file, *arguments, code=2)
    assert all(part in text for part in parts), text
    assert text.startswith("error: ")


def _counted(settings: list[str], file: Path) -> Any:
    """The trainer's own memory model on ranks that there are."""
    fresh_accelerator_state()
    chosen = load_config(file, settings)
    sizes = chosen.model.random_init
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)) if sizes else tiny_llama()
    if chosen.model.lora is not None:
        model = add_lora(model, **chosen.model.lora.model_dump())
    plugin = LongContextPlugin(**chosen.longctx.given())
    trainer = LongContextTrainer(
        model, TrainingArguments(**chosen.training), train_dataset=documents(LENGTHS), plugin=plugin
    )
    return trainer.world.sharding, memory_model(plugin, trainer.model, trainer.args, trainer.world)


@pytest.mark.parametrize(
    "settings",
    [
        ["longctx.sharding=zero3", "training.bf16=true", "training.gradient_checkpointing=true"],
        ["longctx.keep_attention=never", "longctx.mlp_tile_tokens=16", "longctx.ulysses_degree=2"],
        ["training.fsdp=true", "training.fsdp_config={cpu_offload: true}", "longctx.loss_chunk_tokens=64"],
        ["model.random_init=null", "model.path=MODEL", "model.lora={r: 4}", "training.bf16=true"],
    ],
)  # fmt: skip
def test_a_dry_run_counts_memory_as_training_does(settings, file, ranks2: RankPool):
    tiny_llama().config.save_pretrained(file.parent / "model")
    settings = [setting.replace("MODEL", str(file.parent / "model")) for setting in settings]
    counted = ranks2.run(_counted, settings, file)
    fresh_accelerator_state()
    run = planned_run(load_config(file, settings), 2)
    assert [(run.world.sharding, run.memory)] * 2 == counted


@pytest.mark.parametrize("kind", CPU_CORES)
@pytest.mark.parametrize("settings", [["training.bf16=true"], ["model.dtype=bfloat16"], []])
def test_a_dry_run_counts_what_processors_take_to_multiply_bfloat16(kind, settings, file, monkeypatch, capsys):
    """By the kind that is named as by this machine's, if it is of that kind."""
    monkeypatch.setattr(precision, "cpu_kind", lambda: kind)
    monkeypatch.setattr(capacity, "cpu_kind", lambda: kind)
    chosen = load_config(file, settings)
    named, here = (planned_run(chosen, 1, device).memory for device in (f"cpu-{kind}", None))
    fresh_accelerator_state()
    sizes = AutoConfig.for_model(**chosen.model.random_init or {})
    model = AutoModelForCausalLM.from_config(sizes, dtype=getattr(torch, chosen.model.dtype))
    plugin = LongContextPlugin(**chosen.longctx.given())
    trainer = LongContextTrainer(
        model, TrainingArguments(**chosen.training), train_dataset=documents(LENGTHS), plugin=plugin
    )
    assert named == here == memory_model(plugin, trainer.model, trainer.args, trainer.world)
    assert here.product_scratch == (4 if kind == "avx512" and settings else 0)


# Real runs


@pytest.mark.processes
def test_a_mistake_that_all_ranks_find_is_said_once(file: Path, tmp_path: Path):
    """A document that is too long, which the trainer finds on every rank: started here, and by torchrun."""
    arguments = ["train", file, "longctx.capacity=20"]
    for ended in (
        run("-m", "hf_longctx", *arguments, "--ranks", "2"),
        torchrun("-m", "hf_longctx", *arguments),
    ):
        assert ended.code != 0
        assert len(re.findall(r"^error.*: document \d+ has 200 tokens, but all ranks", ended.output, re.MULTILINE)) == 1
        assert ended.output.count("document 11 has 200 tokens") == 1, ended.output


def test_brackets_in_names_are_shown_as_they_are(file, capsys):
    (file.parent / "run [").mkdir()
    named = file.rename(file.parent / "run [" / "x].yaml")
    assert shown(capsys, named, "--dry-run", "--ranks", "2").startswith(f"{named}: 2 process(es)")


def test_more_ranks_than_gpus_are_refused(file, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "gpus", lambda: 2)
    text = shown(capsys, file, "training.use_cpu=false", "--ranks", "3", code=2)
    assert "--ranks 3 on 2 GPUs: start at most 2, or give training.use_cpu=true" in text


def test_the_first_rank_that_fails_speaks_before_ranks_have_met(monkeypatch: Any):
    """The launcher's store knows it, where there is one; else another rank speaks if it is not ended meanwhile."""
    store, waited = ranks.loopback_store(), []
    monkeypatch.setattr(launching.time, "sleep", waited.append)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}
    for name, value in (names | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    assert [_failed_first(), _failed_first()] == [True, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _failed_first()
    assert not waited
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert _failed_first()
    assert len(waited) == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _failed_first()
    assert len(waited) == 1


@pytest.mark.parametrize(
    ("variables", "started"),
    [
        ({}, 8),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 8),  # a cluster's, which counts machines
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, 0),
        ({"WORLD_SIZE": "2", "RANK": "1"}, 0),
    ],
)
def test_no_ranks_are_started_under_a_launcher_be_it_of_one(variables, started, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    counts: list[int] = []
    monkeypatch.setattr(ranks, "gpus", lambda: 8)
    monkeypatch.setattr(ranks, "on_cpu", lambda: False)
    monkeypatch.setattr(ranks, "_joined", lambda *_: counts.append(0))
    monkeypatch.setattr(ranks, "start_ranks", lambda *given: counts.append(given[-1]))
    ranks.on_ranks(print, ranks=None, cpu=False)
    assert counts == [started]
    assert ranks.has_launcher() == (not started)


@pytest.mark.processes
@pytest.mark.parametrize("alone", [False, True], ids=["after ranks have met", "before"])
def test_an_error_of_one_rank_ends_all_and_only_it_speaks(alone: bool, tmp_path: Path):
    program = tmp_path / "failing.py"
    program.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "from hf_longctx.commands.preflight.launching import one_voice\n"
        "def meet(): dist.init_process_group('gloo')\n"
        f"{'' if alone else 'meet()'}\n"
        "try:\n"
        "    with one_voice():\n"
        "        if os.environ['RANK'] == '1':\n"
        "            raise ValueError('rank 1 has no file')\n"
        f"        {'meet()' if alone else ''}\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "except ValueError as error:\n"
        "    sys.exit(f'error: {error}')\n"
    )
    ended = torchrun(program)
    assert ended.code != 0
    assert ended.output.count("error: rank 1 has no file") == 1
    assert "RuntimeError" not in ended.output


@pytest.mark.processes
def test_ranks_that_an_interrupted_launcher_leaves_are_ended_and_no_other_process():
    commands = [["sleep", "60"]] * 2
    environments = [os.environ | {"TORCHELASTIC_RUN_ID": name} for name in ("this run", "another")]
    rank, other = [
        subprocess.Popen(command, env=environment, start_new_session=True)
        for command, environment in zip(commands, environments)
    ]
    try:
        _end_ranks("this run")
        assert rank.wait(PATIENCE) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_environment_of_a_process_that_is_starting_is_read_again(monkeypatch):
    environments = [{}, {}, {"A": "1"}]
    monkeypatch.setattr(psutil.Process, "environ", lambda process: environments.pop(0))
    assert _environment(psutil.Process()) == {"A": "1"}


LAUNCHED = (
    "from hf_longctx.commands.preflight.launching import end_with_launcher as e; e(); print(1, flush=True); input()"
)
"""A rank that waits until it is ended."""
LAUNCHES = f"""import os, subprocess, sys
os.environ["{LAUNCHER}"] = sys.argv[1] or str(os.getpid())
rank = subprocess.Popen([sys.executable, "-c", {LAUNCHED!r}], stdin=0, stdout=subprocess.PIPE)
print(rank.pid, rank.stdout.readline(), flush=True)
rank.wait()"""


@pytest.mark.processes
@pytest.mark.parametrize(("named", "ends"), [("", True), ("1", False)])
def test_a_rank_ends_with_the_launcher_that_was_killed(named: str, ends: bool):
    """One that another process than its parent has named as its launcher goes on."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHES, named], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline().split()[0]))
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs([rank], timeout=PATIENCE if ends else 0.3)
    assert bool(alive) != ends
    launcher.stdin.close()  # ends the one that goes on
