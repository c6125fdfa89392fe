"""`bf16: auto`: what it comes to on which device, and which words a file of settings may say."""

import pytest
import torch
import yaml

from hf_longctx import precision
from hf_longctx.commands.shared.costs import read_device
from hf_longctx.config import ConfigError, load_config
from hf_longctx.hardware.speeds import CPU_CORES
from hf_longctx.precision import Decision, Rates, cpu_kind, decide_for, decide_here, product_rates, with_precision
from hf_longctx.training.measuring.step_costs import cost_model
from tests.builders.config_files import ROOT
from tests.builders.tiny_models import tiny_llama
from tests.builders.training.precision_runs import FASTER, SLOWER, TIE, file_of

CPU = torch.device("cpu")
FLAGS = {
    "amx": "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile",
    "avx512_bf16": "flags\t\t: fpu avx2 avx512f avx512_bf16",
    "avx512": "flags\t\t: fpu avx2 avx512f avx512bw",
    "none": "flags\t\t: fpu avx2",
}


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
