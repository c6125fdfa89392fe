"""Which GPU a rank takes that has not been told, under plain torchrun."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_longctx.attention import exchange
from hf_longctx.settings.gpu_environment import hide_gpus
from hf_longctx.training.arguments import refuse_cpu_ranks_that_see_gpus


@pytest.mark.parametrize(
    ("local_rank", "gpus", "current", "backend", "chosen"),
    [
        ("3", 8, 0, "nccl", 3),
        ("3", 8, 0, "cpu:gloo,cuda:nccl", 3),
        ("3", 8, 5, "nccl", None),  # the program has chosen
        ("3", 1, 0, "nccl", None),  # CUDA_VISIBLE_DEVICES has
        ("0", 8, 0, "nccl", None),
        ("3", 8, 0, "gloo", None),
        (None, 8, 0, "nccl", None),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(local_rank, gpus, current, backend, chosen, monkeypatch):
    taken: list[int | None] = [None]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    exchange._choose_gpu()
    assert taken[-1] == chosen


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"LOCAL_RANK=2, and 2 GPUs are visible.*Valid: at most 2 processes"):
        exchange._choose_gpu()


@pytest.mark.parametrize(
    ("device", "gpus", "refused"), [("cpu", 1, True), ("cpu", 2, False), ("cpu", 0, False), ("cuda", 1, False)]
)
def test_a_rank_on_a_cpu_that_sees_too_few_gpus_is_refused(device, gpus, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    accelerator = SimpleNamespace(device=torch.device(device), local_process_index=1)
    if refused:
        with pytest.raises(ValueError, match=r"see 1 GPU, .* takes GPU 1 for.*CUDA_VISIBLE_DEVICES= accelerate"):
            refuse_cpu_ranks_that_see_gpus(accelerator)
    else:
        refuse_cpu_ranks_that_see_gpus(accelerator)


def test_ranks_on_cpus_see_no_gpu():
    alone, several = {"RANK": "0"}, {"WORLD_SIZE": "2"}
    hide_gpus(alone)
    hide_gpus(several)
    assert "CUDA_VISIBLE_DEVICES" not in alone
    assert several["CUDA_VISIBLE_DEVICES"] == ""
