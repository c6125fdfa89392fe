"""Clusters: published numbers, what is made of them, and a machine that was measured."""

from dataclasses import replace

import pytest
import torch

from hf_longctx import LongContextPlugin
from hf_longctx.hardware.devices import (
    A100,
    ASCEND_910B,
    BYTESCALE,
    CLUSTERS,
    H100,
    H200,
    H800,
    Cluster,
    from_profile,
    gpu_speed,
    preset_of,
    said_of_speeds,
)
from hf_longctx.hardware.model_sizes import ModelSizes, model_flops
from hf_longctx.hardware.profile import CalibrationError, Profile
from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.hardware.speeds import CPU_CORE, GPU
from hf_longctx.planner import Topology
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.training.measuring.measurements import peak_flops
from hf_longctx.training.measuring.step_costs import cost_model
from hf_longctx.training.preparation import agreed_gpu
from tests.builders.tiny_models import tiny_llama

BYTESCALE_7B = replace(ARCHITECTURES["llama-7b"], num_key_value_heads=8)
CHUNK = 8192


def test_bytescales_case_study():
    """Milliseconds of one layer's forward, in chunks of 8192 tokens: MLP 9 to 10, attention of half a block 2.8, exchange of
    a chunk 1.4 to 1.9."""
    speed = BYTESCALE.speed()
    mlp = 2 * 3 * 4096 * 11008 * CHUNK / speed.linear_flops
    assert 9e-3 <= mlp <= 10e-3
    # Flash attention spends 1 of 3.5 parts of its time forward, where the count of FLOPs says 1 of 3.
    attention = 4 * 4096 * CHUNK**2 / 2 / (speed.attention_flops * 3.5 / 3)
    assert attention == pytest.approx(2.8e-3, rel=0.03)
    exchange = 2 * 2 * 8 * 128 * CHUNK / speed.between_bytes
    assert 1.4e-3 <= exchange <= 1.9e-3


def test_bytescales_64k_tokens():
    """5.08 s in all on what fills 80 GB; our prediction counts no dead time, so it is lower."""
    cost = CostModel.from_config(BYTESCALE_7B, BYTESCALE.speed(), ranks_per_node=8)
    assert 0.7 <= cost.time(65536, 8) / 1e9 / 5.08 <= 1.0
    hopper = CostModel.from_config(BYTESCALE_7B, H800.speed(), ranks_per_node=8)
    assert hopper.time(65536, 8) / 1e9 < 0.6 * 5.08  # the case study was not run on a Hopper
    recomputed = MemoryModel.from_config(BYTESCALE_7B, sharding="zero1", world_size=1024, checkpointing=True)
    assert recomputed.capacity(BYTESCALE.device_bytes) > 8192


def test_presets_order_as_their_makers_say():
    speeds = {name: cluster.speed() for name, cluster in CLUSTERS.items()}
    assert speeds["h800"] == replace(speeds["h100"], inside_bytes=160e9, reduce_bytes=160e9)
    assert (
        speeds["h200"].optimizer_parameters > speeds["h100"].optimizer_parameters > speeds["a100"].optimizer_parameters
    )
    assert H200.device_bytes > 1.7 * H100.device_bytes
    for name, speed in speeds.items():
        assert speed.linear_flops < CLUSTERS[name].matmul_flops
        assert speed.attention_flops <= speed.linear_flops
        assert speed.between_bytes < speed.reduce_bytes <= CLUSTERS[name].inside_bytes
        assert speed.between_bytes <= speed.inside_bytes
        assert speed.attention_half_tokens == GPU.attention_half_tokens
    assert A100.host_bytes_per_rank == 2**38


def test_a_full_mesh_gives_a_pair_one_of_its_links():
    speed = ASCEND_910B.speed()
    assert speed.inside_bytes == pytest.approx(0.8 * 28e9)
    assert speed.reduce_bytes == pytest.approx(0.8 * 196e9)
    assert replace(ASCEND_910B, mesh_links=1).speed().inside_bytes == pytest.approx(0.8 * 196e9)


def test_slow_network_limits_the_sum_of_gradients():
    slow = replace(H100, between_bytes=10e9, between_share=0.5)
    assert slow.speed().reduce_bytes == pytest.approx(8 * 5e9)


TOTALS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-70b": 68_976_648_192,
    "mistral-8x7b": 46_702_792_704,
    "mistral-8x22b": 140_630_071_296,
}
"""Parameters in the published checkpoints."""


def test_architectures_have_their_published_sizes():
    assert {name: ModelSizes.of(model, 1).parameters for name, model in ARCHITECTURES.items()} == TOTALS
    for model in ARCHITECTURES.values():
        flops = model_flops(model)
        assert flops.layers == model.num_hidden_layers
        active = model.num_experts_per_tok or 1
        assert flops.linear > 6 * model.num_hidden_layers * 3 * active * model.hidden_size * model.intermediate_size


def test_capacity_of_presets_decides_who_can_train_what():
    def capacity(name: str, cluster: Cluster, sharding: str) -> int:
        model = MemoryModel.from_config(ARCHITECTURES[name], sharding=sharding, world_size=1024, checkpointing=True)
        return model.capacity(cluster.device_bytes)

    assert capacity("llama-7b", H200, "zero1") > 1.9 * capacity("llama-7b", H100, "zero1") > 0
    assert capacity("llama-70b", H100, "zero3") > 8192
    with pytest.raises(ValueError, match="not a single token fits"):
        capacity("llama-70b", H100, "zero1")


def a_profile(device: str) -> Profile:
    return Profile(
        speed=replace(CPU_CORE, linear_flops=2.5e11),
        points=(),
        predicted_seconds=(),
        clock="wall",
        device=device,
        backend="gloo",
        world_size=2,
        ranks_per_node=2,
        threads=1,
        precision="bfloat16",
        device_bytes=4 * 2**30,
        host_bytes=8 * 2**30,
        model={},
        versions={},
    )


def test_this_machine(tmp_path):
    path = tmp_path / "profile.json"
    a_profile("a CPU").save(path)
    cluster = from_profile(path)
    assert cluster.speed() == a_profile("a CPU").speed
    assert (cluster.name, cluster.ranks_per_node) == ("a CPU", 2)
    assert (cluster.device_bytes, cluster.host_bytes_per_rank) == (4 * 2**30, 4 * 2**30)
    assert cluster.matmul_flops == 2.5e11
    assert cluster.host_bandwidth == 0

    a_profile("NVIDIA H200").save(path)
    assert from_profile(path).matmul_flops == H200.matmul_flops
    assert from_profile(path).host_bandwidth == H200.host_bandwidth


def test_attention_is_as_fast_as_the_kernel_that_is_named(tmp_path):
    faster = H200.attending_by("flash_attn_3")
    assert faster.speed().attention_flops == 0.51 * H200.matmul_flops
    assert faster.speed().linear_flops == H200.speed().linear_flops
    for kernel in ("flash_attn_2", "cuda_varlen"):
        assert H200.attending_by(kernel) == H200
    path = tmp_path / "profile.json"
    a_profile("NVIDIA H200").save(path)
    for cluster, valid in ((CLUSTERS["a100"], "cuda_varlen, flash_attn_2"), (from_profile(path), "none, as a profile")):
        with pytest.raises(ValueError, match=rf"by 'flash_attn_3' on .* is not known; valid: {valid}"):
            cluster.attending_by("flash_attn_3")
    assert not CLUSTERS["b200"].other_kernels  # an H100's share says nothing of it


def test_no_profile(tmp_path):
    with pytest.raises(CalibrationError, match=r"missing\.json"):
        from_profile(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ranks_per_node", 0, r"Cluster\.ranks_per_node is 0; it must be at least 1"),
        ("matmul_flops", 0.0, r"Cluster\.matmul_flops is 0\.0; it must be positive"),
        ("attention_share", 1.5, r"Cluster\.attention_share is 1\.5; it must be a share of the peak, in \(0, 1\]"),
        ("host_bandwidth", -1.0, r"Cluster\.host_bandwidth is -1\.0; it must be 0 \(unknown\) or positive"),
    ],
)
def test_settings_out_of_range(field: str, value: float, message: str):
    with pytest.raises(ValueError, match=message):
        replace(H100, **{field: value})
    assert isinstance(H100, Cluster)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H800", "h800"),
        ("Ascend910B3", "ascend-910b"),
        ("h100", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H20", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA RTX A4000", None),
        (None, None),
    ],
)
def test_a_device_is_planned_with_its_own_speeds_or_says_whose(name: str | None, preset: str | None, caplog):
    speed = preset_of(name)
    assert (speed.name if speed else None) == preset
    assert gpu_speed(name) == CLUSTERS[preset or "a100"].speed()
    sentence = said_of_speeds(name)
    assert ("planned with an A100's speeds" in sentence and "hf-longctx profile" in sentence) == (preset is None)
    if name is None:
        return
    cuda, model = torch.device("cuda"), tiny_llama(dtype=torch.bfloat16)
    assert agreed_gpu(cuda, speaks=True, name_of=lambda device: name) == name
    assert len(caplog.messages) == (preset is None)
    agreed_gpu(cuda, speaks=False, name_of=lambda device: name)
    assert len(caplog.messages) == (preset is None), "a profile or a cost model of one's own is nobody's guess"
    cost = cost_model(LongContextPlugin(capacity=8), model, Topology(2, 8), cuda, gpu=name)
    expected = CostModel.from_config(model.config, CLUSTERS[preset or "a100"].speed(), world_size=2)
    assert (cost.linear_ps, cost.inside_ps) == (expected.linear_ps, expected.inside_ps)


def test_published_peaks_are_one_fact():
    for word in ("A100", "H100", "H800", "H200", "B200", "GB200", "L40S", "RTX 4090", "RTX 5090", "MI300X"):
        assert peak_flops(f"NVIDIA {word}", True, None) == CLUSTERS[word.lower().replace(" ", "-")].matmul_flops
    assert peak_flops("NVIDIA H100 PCIe", True, None) < peak_flops("NVIDIA H100", True, None)
    assert peak_flops("NVIDIA GeForce RTX 3090", True, None) == 71e12
    for device in ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        with pytest.raises(ValueError, match=r"MIG 1g\.10gb is unknown: give a profile"):
            peak_flops(device, True, None)
