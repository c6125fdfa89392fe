"""What a run measures of itself: loss by length against plain losses, FLOPs against torch's own count, and what Trainer logs."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from hf_longctx.hardware.model_sizes import model_flops
from hf_longctx.hardware.profile import Profile
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.models.loss.loss_by_length import BUCKETS, EDGES, LossByLength
from hf_longctx.planner import GlobalBatches
from hf_longctx.training.measuring.measurements import Measurements, StepFlops, host_peak, peak_flops
from tests.builders.tiny_models import tiny_llama, tiny_mistral, tiny_mixtral
from tests.builders.training_runs import MODELS, Run, documents, train
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 300, 2, 9, 257, 40, 8, 1100, 90, 256]
"""Of three buckets: to_256, to_1K, to_4K."""
PLUGIN = {"capacity": 700, "global_batch_documents": len(LENGTHS)}
SETTINGS = {"max_steps": 2, "learning_rate": 0.0, "logging_steps": 2}
CPU = torch.device("cpu")


def own_losses(model: Any, rows: Any) -> dict[str, float]:
    """Loss per label token of each bucket, every document alone, by plain transformers."""
    sums = dict.fromkeys(BUCKETS, np.zeros(2))
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        expected = torch.tensor(row.get("labels", row["input_ids"])[1:])
        with torch.no_grad():
            losses = cross_entropy(model(ids, use_cache=False).logits[0, :-1].float(), expected, reduction="none")
        bucket = BUCKETS[int(np.searchsorted(EDGES, ids.numel()))]
        sums[bucket] = sums[bucket] + [float(losses.sum()), int((expected != -100).sum())]
    return {name: loss / tokens for name, (loss, tokens) in sums.items() if tokens}


def logged(run: Run) -> dict[str, float]:
    return {name.split("/")[1]: value for name, value in run.log[0].items() if name.startswith("loss_by_length/")}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_loss_by_length_is_that_of_each_document_alone_however_it_is_split(name: str, ranks2: RankPool, tmp_path):
    rows = documents(LENGTHS, labels=True)
    expected = own_losses(MODELS[name]().eval(), rows)
    assert set(expected) == {"to_256", "to_1K", "to_4K"}
    runs = ranks2.run(train, name, rows, PLUGIN, SETTINGS | {"output_dir": tmp_path})
    for run in runs:
        assert run.log[0]["split_documents"] >= 1
        assert logged(run) == pytest.approx(expected, rel=1e-4)
    assert len({run.log[0]["peak_memory_gib"] for run in runs}) == 1, "the fullest rank's, on all"


def test_buckets_end_at_their_edges():
    lengths = [256, 257, 1024, 1025, 2**20, 2**20 + 1]
    losses = LossByLength(CPU)
    for document, length in enumerate(lengths):
        observe = losses.observer(Layout({0: (Segment(document, 0, length),)}), 0)
        observe(torch.tensor([0, length - 1]), torch.tensor([1.0, 2.0]))
    sums, counts = losses.take().tolist()
    assert dict(zip(BUCKETS, counts)) == {
        **dict.fromkeys(BUCKETS, 0),
        "to_256": 2,
        "to_1K": 4,
        "to_4K": 2,
        "to_1M": 2,
        "over_1M": 2,
    }
    assert sums == [1.5 * count for count in counts]
    assert not losses.take().any(), "taken once"


def test_flops_are_those_that_torch_counts():
    # Of the products, forward and backward, beside attention's: torch counts every pair of a query and a key, and twice the
    # products of one half of them is what causal attention needs; this package counts s^2 / 2 pairs.
    model = tiny_llama(attn_implementation="eager", tie_word_embeddings=True)
    length = 96
    with FlopCounterMode(display=False, depth=None) as counter:
        model(torch.arange(length).unsqueeze(0) % 128, labels=torch.arange(length).unsqueeze(0) % 128).loss.backward()
    config = model.config
    pairs = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length**2
    plan = SimpleNamespace(length=np.array([length]), unlabelled=np.array([0]))
    angles = sum(counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {}).values())  # products, once
    # The first layer's inputs are embeddings, whose gradient no product needs less for: all are trained.
    assert StepFlops(model).of(plan) == counter.get_total_flops() - pairs // 2 - angles


def test_flops_of_windows_and_adapters():
    plan = SimpleNamespace(length=np.array([50, 3]), unlabelled=np.array([0, 0]))
    window, full = StepFlops(tiny_mistral()), StepFlops(tiny_mistral(sliding_window=None))
    pairs = 7 * (2 * 50 - 7) + 3 * 3
    assert full.of(plan) - window.of(plan) == model_flops(tiny_mistral().config).attention * (50**2 + 3**2 - pairs)
    base = StepFlops(tiny_llama())
    adapted = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    weights = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert StepFlops(adapted).linear == base.linear * 4 // 6 + 6 * weights
    assert StepFlops(tiny_mixtral(num_experts_per_tok=4)).linear > StepFlops(tiny_mixtral(num_experts_per_tok=2)).linear
    partly = tiny_llama()
    partly.lm_head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="some weights are frozen"):
        StepFlops(partly)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
    ],
)
def test_peaks_of_known_devices(device: str, peak: float):
    assert peak_flops(device, True, None) == peak


def test_an_unknown_peak_is_a_reason_and_no_number(profile):
    with pytest.raises(ValueError, match="float32"):
        peak_flops("NVIDIA H100 80GB HBM3", False, None)
    with pytest.raises(ValueError, match="peak of cpu is unknown: give a profile"):
        peak_flops("cpu", True, None)
    assert peak_flops("cpu", True, profile) == 4e11
    arguments = SimpleNamespace(device=CPU, world_size=1, bf16=False, fp16=False)
    measurements = Measurements(tiny_llama(), arguments, None)
    assert "peak of cpu is unknown" in measurements.no_mfu
    assert set(measurements.log()) == {"peak_memory_gib"}


@pytest.fixture
def profile(tmp_path) -> str:
    """A machine whose products achieve 4e11 FLOP/s."""
    from hf_longctx.planner import CPU_CORE

    speed = dataclasses.replace(CPU_CORE, linear_flops=4e11, attention_flops=1e11)
    path = tmp_path / "profile.json"
    Profile(
        speed=speed,
        points=(),
        predicted_seconds=(),
        clock="wall",
        device="a CPU",
        backend="gloo",
        world_size=2,
        ranks_per_node=2,
        threads=1,
        precision="float32",
        device_bytes=2**30,
        host_bytes=2**31,
        model={},
        versions={},
    ).save(path)
    return str(path)


def test_tensorboard_has_our_numbers(profile, tmp_path):
    """Event files as Trainer's own callback writes them."""
    rows = documents(LENGTHS)
    settings = {"output_dir": tmp_path, "max_steps": 3, "logging_steps": 1, "report_to": ["tensorboard"]}
    run = train("llama", rows, {"capacity": 2000, "global_batch_documents": 4, "profile": profile}, settings)
    (folder,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    for name in (
        *("loss", "plan_balance", "plan_idle", "exchanged_mib", "prediction_error"),
        *("tokens_per_second", "mfu", "peak_memory_gib", "loss_by_length/to_256"),
    ):
        assert f"train/{name}" in names
        points = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        expected = [(entry["step"], entry[name]) for entry in run.log if name in entry]
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    batches = GlobalBatches(np.array(LENGTHS), 3, documents=4)
    flops = StepFlops(tiny_llama())
    taken = sum(tokens / speed for tokens, speed in zip(run.series("tokens"), run.series("tokens_per_second")))
    assert sum(run.series("measured_step_seconds")) < taken < run.log[-1]["train_runtime"]
    for batch, speed, mfu in zip(batches.epoch(0), run.series("tokens_per_second"), run.series("mfu"), strict=True):
        lengths = np.array(LENGTHS)[batch]
        counted = flops.of(SimpleNamespace(length=lengths, unlabelled=np.zeros(len(lengths), int)))
        assert mfu == pytest.approx(counted / (lengths.sum() / speed) / 4e11, rel=1e-3)
    assert all(0.05 < value < 64 for value in run.series("peak_memory_gib"))


def collectives(folder: Any, steps: int) -> int:
    """How many a run of so many steps takes on this rank, without any log."""
    count = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"):
            original = getattr(dist, name)

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                return original(*args, **kwargs)

            patch.setattr(dist, name, counted)
        settings = {"output_dir": folder, "max_steps": steps, "logging_steps": 100}
        train("llama", documents(LENGTHS), PLUGIN | {"global_batch_documents": 4, "recalibrate_steps": 0}, settings)
    return count


def test_nothing_more_is_sent_for_it(ranks2: RankPool, tmp_path):
    """A step agrees on its plan, sums losses, sums gradients, agrees that they are finite, and on what callbacks ask for."""
    # The first run of a process has no groups of an earlier one to free.
    _, one, two = (ranks2.run(collectives, tmp_path, steps) for steps in (1, 1, 2))
    assert [more - less for more, less in zip(two, one)] == [5, 5]


@pytest.mark.parametrize(("system", "size"), [("linux", 3 * 2**20), ("darwin", 3 * 2**10)])
def test_memory_is_counted_in_bytes_whatever_the_system_counts_in(system, size, monkeypatch):
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**10))
    assert host_peak() == size
