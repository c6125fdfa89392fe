"""Bytes of a GPU that are no tensor's of ours: NCCL's rules and kernels' own memory, beside numbers that others have published or
that follow from the packages' sources by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_longctx.attention.kernels import KERNELS
from hf_longctx.attention.kernels.padded_heads import PaddedHeads
from hf_longctx.attention.kernels.repeated_heads import RepeatedHeads
from hf_longctx.counting.records import AttentionShape
from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.hardware.kernel_bytes import Conditions
from hf_longctx.hardware.nccl import (
    EXCHANGE_CHANNELS,
    MIB,
    PAIR_BYTES,
    Communicator,
    exchange_bytes,
    exchange_groups,
)
from hf_longctx.hardware.published import ARCHITECTURES, LLAMA_31_8B
from hf_longctx.parallel.world import World
from hf_longctx.planner.memory.device_bytes import CONTEXT, MARGIN, bytes_outside
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.simulator.machine import Machine
from hf_longctx.simulator.sweep import Run
from hf_longctx.training.memory import capacity
from tests.builders.tiny_models import tiny_llama

GIB = 2**30
LLAMA_7B = ARCHITECTURES["llama-7b"]
H100 = Machine.of(CLUSTERS["h100"], LLAMA_7B)


@pytest.mark.parametrize(
    ("version", "channels"),
    [((2, 27), [2, 1, 1, 1, 1]), ((2, 28), [2, 1, 1, 1, 1]), ((2, 29), [4, 2, 2, 1, 1]), ((2, 30), [4, 2, 2, 1, 1])],
)
def test_a_network_gives_a_pair_few_channels_and_fewer_the_more_ranks(version: tuple[int, int], channels: list[int]):
    """32 channels, a card of 50 GB/s: 2 * 64 is not more than 4 * 32, and ceil(50 / 14) = 4 pairs fit 64 / 8 times into 32."""
    groups = [Communicator(ranks, 8) for ranks in (64, 72, 128, 256, 1024)]
    assert [group.channels_of_a_pair(version) for group in groups] == channels


def test_what_is_asked_for_holds_and_never_more_than_the_group_has():
    assert Communicator(1024, 8, net_channels=4).channels_of_a_pair((2, 28)) == 4
    assert Communicator(1024, 8, most_channels=2, net_channels=4).channels_of_a_pair((2, 30)) == 2
    assert Communicator(16, 8, net_bytes=25e9).channels_of_a_pair((2, 30)) == 2
    assert Communicator(8, 8, most_channels=6).channels_of_a_pair() == 8, "a power of two"
    assert Communicator(8, 8).channels_of_a_pair() == 32
    with pytest.raises(ValueError, match="ranks_here=9 must be one of 1 to 8"):
        Communicator(8, 9)


def test_pairs_of_a_node_take_what_was_measured():
    """nccl issue 1685: 1.06 -> 4.34 GB at the first all-to-all of 8 GPUs. A pair's buffers are 5 and 1 pieces of 2 MiB."""
    pairs = Communicator(8, 8).message_memory(7, False)
    assert pairs == 7 * 32 * 12 * MIB
    assert pairs == pytest.approx(4.34e9 - 1.06e9, rel=0.15)


def test_an_exchange_takes_what_its_groups_take():
    ring, inside = EXCHANGE_CHANNELS * PAIR_BYTES, 7 * EXCHANGE_CHANNELS * PAIR_BYTES
    shared = (1 + 8) * EXCHANGE_CHANNELS * 16 * 128 * 1024
    assert exchange_bytes(1, 8) == 0
    assert exchange_bytes(8, 8) == ring + inside
    for ranks in (64, 1024):
        assert exchange_bytes(ranks, 8) == ring + inside + 2 * (ring + shared)
    assert [crosses for _, _, crosses in exchange_groups(4, 1)] == [True, True], "nodes of one GPU have no group inside"
    assert bytes_outside(1, 8) == CONTEXT
    assert bytes_outside(8, 8) == CONTEXT + exchange_bytes(8, 8) + 32 * PAIR_BYTES
    assert bytes_outside(1, 8, tensor_parallel=8) == CONTEXT + 2 * 32 * PAIR_BYTES


@pytest.mark.parametrize(
    ("nodes", "before", "now"), [(1, (6144, 6144), 768), (8, (2256, 2592), 1248), (128, (2088, 2088), 1248)]
)
def test_groups_by_node_take_less_than_two_of_all_ranks(nodes: int, before: tuple[int, int], now: int):
    """The table of docs/gpus.md: MiB, by NCCL 2.28 and 2.30."""
    ranks = 8 * nodes
    everyone = Communicator(ranks, 8)
    for version, expected in zip(((2, 28), (2, 30)), before):
        group_bytes = everyone.collective_bytes() + everyone.message_memory(7, nodes > 1, version)
        assert 2 * group_bytes == expected * MIB
        assert exchange_bytes(ranks, 8, version) == now * MIB


@pytest.mark.parametrize(
    ("kernel", "deterministic", "tokens", "heads", "kv_heads", "gib"),
    [
        # splits * tokens * heads * 128 * 4 bytes, and keys and values once for each query head in bfloat16
        ("flash_attn_2", True, 16384, 32, 8, 5 * 0.25 + 0.25),
        ("flash_attn_2", True, 32768, 32, 8, 3.0),
        ("cuda_varlen", True, 32768, 4, 1, 33 * 0.0625 + 0.0625),  # tensor parallel 8
        ("cuda_varlen", True, 131072, 4, 1, 33 * 0.25 + 0.25),  # Ulysses 8, 16K tokens a rank
        ("flash_attn_2", False, 16384, 32, 8, 0.25 + 0.25),
        ("flash_attn_2", False, 16384, 32, 32, 0.25),
        ("flash_attn_3", True, 16384, 32, 8, 0.25 + 2 * 0.0625),
        ("flash_attn_4", False, 16384, 32, 8, 0.25 + 2 * 0.0625),
    ],
)
def test_kernels_take_what_their_sources_ask_for(
    kernel: str, deterministic: bool, tokens: int, heads: int, kv_heads: int, gib: float
):
    """But for rows of float32, one or two to a head: less than 2 %. Beside what they return, in bfloat16."""
    shape, returned = AttentionShape(heads, kv_heads, 128, 128), 2 * 128 * (heads + 2 * kv_heads)
    token = KERNELS[kernel].workspace(shape, Conditions(deterministic=deterministic)) - returned
    assert gib <= token * tokens / GIB < 1.02 * gib


@pytest.mark.parametrize("name", ["cpu_flash", "tiled", "reference"])
def test_kernels_without_memory_of_their_own_take_half_precision_in_float32(name: str):
    """3 tensors of queries (8 heads of 64), keys and values (2 heads each); a tile's gradients of those where there is ALiBi."""
    shape = AttentionShape(8, 2, 64, 64)
    taken = [
        KERNELS[name].workspace(shape, Conditions(element_bytes, alibi=alibi))
        for element_bytes in (2, 4)
        for alibi in (False, True)
    ]
    assert taken == [4 * 64 * (3 * 8 + 2 * 2)] * 2 + [0, 4 * 64 * 2 * 2]


def test_every_kernel_states_its_memory():
    """Wrapped ones that of the kernel inside."""
    shape, conditions = AttentionShape(8, 2, 128, 64), Conditions()
    for kernel in KERNELS.values():
        taken = kernel.workspace(shape, conditions)
        assert taken >= 2 * 8 * 128
        assert PaddedHeads(kernel).workspace(shape, conditions) == taken
        assert RepeatedHeads(kernel, (2, 1)).workspace(shape, conditions) == taken


def test_a_kernel_that_takes_much_leaves_room_for_fewer_tokens():
    def most_tokens(kernel: str, **settings: Any) -> int:
        workspace = KERNELS[kernel].workspace
        memory = MemoryModel.from_config(
            LLAMA_31_8B, sharding="zero3", world_size=64, checkpointing=True, workspace=workspace, **settings
        )
        return memory.capacity(80 * GIB, MARGIN)

    eight_heads = {"ulysses_degree": 8}
    assert most_tokens("cuda_varlen", deterministic=True, **eight_heads) < 0.6 * most_tokens(
        "cuda_varlen", **eight_heads
    )
    assert most_tokens("flash_attn_3", deterministic=True, **eight_heads) == most_tokens("flash_attn_3", **eight_heads)


@pytest.mark.parametrize("usable", [70 * GIB, 76 * GIB])
def test_a_gpu_is_asked_for_what_is_free(usable: int, monkeypatch):
    """The device is one that is not here; what it says is given."""
    memory = MemoryModel.from_config(LLAMA_31_8B, sharding="zero3", world_size=8, checkpointing=True)
    monkeypatch.setattr(capacity, "memory_model", lambda *_: memory)
    asked = []

    def answer(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return usable, 80 * GIB

    args = SimpleNamespace(device=torch.device("cuda", 0), world_size=1)
    counted = capacity.capacity_of_memory(LongContextPlugin(), None, args, World(1, "ddp"), answer)
    assert asked == [args.device]
    assert counted == memory.capacity(usable, MARGIN)


@pytest.mark.parametrize(
    ("tokens", "device", "chunk"), [(88_000, "cuda", 4096), (16_384, "cuda", 1024), (88_000, "cpu", 1024)]
)
def test_logits_of_more_tokens_exist_at_once_where_that_takes_no_memory(
    tokens: int, device: str, chunk: int, monkeypatch
):
    """A full micro-batch of Llama 8B is fuller in its layers; a small one in its loss."""

    def counted(plugin: LongContextPlugin, *_: Any) -> MemoryModel:
        chunk = plugin.loss_chunk_tokens
        return MemoryModel.from_config(
            LLAMA_31_8B, sharding="zero3", world_size=8, checkpointing=True, loss_chunk_tokens=chunk
        )

    monkeypatch.setattr(capacity, "memory_model", counted)
    args = SimpleNamespace(device=torch.device(device), world_size=8)
    plugin = LongContextPlugin(capacity=tokens)
    assert capacity.loss_chunk_of_memory(plugin, None, args, World(8, "zero3")) == chunk
    least, chosen = (counted(plugin.changed(loss_chunk_tokens=size)).peak(tokens) for size in (1024, chunk))
    assert chosen <= least


def test_free_memory_and_what_the_allocator_has_are_usable(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15)
    assert capacity.usable_bytes(torch.device("cuda", 0)) == (75, 80)


def test_nccl_gives_messages_of_one_large_group_few_channels_and_ours_what_they_need():
    """1,024 ranks in one group: a channel of 14 GB/s over the network, and of 20 over NVLink, where a card has 50 and NVLink
    450. Groups by node, four channels asked for: the card decides between nodes, and eight channels inside."""
    one = H100.under_nccl(1024, (2, 28), by_node=False)
    assert (one.speed.inside_bytes, one.speed.between_bytes, one.card_bytes) == (20e9, 14e9, 14e9)
    newer = H100.under_nccl(64, (2, 30), by_node=False)
    assert newer.speed.between_bytes == H100.speed.between_bytes < 4 * 14e9
    ours = H100.under_nccl(1024, (2, 28))
    assert (ours.speed.inside_bytes, ours.speed.between_bytes) == (160e9, H100.speed.between_bytes)
    assert ours.speed.attention_flops == H100.speed.attention_flops
    assert H100.under_nccl(1, (2, 28)) == H100


def test_a_run_under_nccl_has_its_buffers_in_its_memory():
    settings = {"config": LLAMA_7B, "cluster": CLUSTERS["h100"], "devices": 64, "context": 2**17, "sharding": "zero3"}
    plain, under = Run(**settings, recompute=True), Run(**settings, recompute=True, nccl=(2, 28))
    assert under.memory.outside == bytes_outside(64, 8)
    assert under.tokens_per_rank < plain.tokens_per_rank
    assert under.machine.speed.inside_bytes < plain.machine.speed.inside_bytes


@pytest.mark.parametrize(
    ("weights", "autocast", "dtype"),
    [
        (torch.bfloat16, {}, torch.bfloat16),
        (torch.float32, {}, torch.float32),
        (torch.float32, {"fp16": True}, torch.float16),
    ],
)
def test_a_gpus_kernel_is_chosen_for_the_dtype_in_which_attention_computes(weights, autocast, dtype, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(capacity, "select_kernel", lambda call, name: asked.append(call) or KERNELS["tiled"])
    of_heads = capacity.AttentionCall.of_heads
    monkeypatch.setattr(capacity.AttentionCall, "of_heads", lambda *sizes: of_heads(*sizes[:-1], torch.device("meta")))
    model = tiny_llama().to(weights)
    args = SimpleNamespace(device=torch.device("cuda", 0), **{"bf16": False, "fp16": False} | autocast)
    assert capacity.kernel_of_run(LongContextPlugin(capacity=64), model, args) is not None
    assert asked[0].q.dtype is dtype
