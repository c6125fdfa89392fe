"""What goes to host memory, how many bytes, and that the device's are free.

That gradients keep every bit is shown in test_activations.py. Host memory of a CPU test is numpy's, so that torch's
allocator, whose bytes are counted here, stands for the device.
"""

import itertools
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.training.memory.activation_offload import PIECE_BYTES, HostMemory
from hf_longctx.training.memory.activations import ActivationMemory
from tests.builders.tiny_models import tiny_llama

TOKENS = 777
"""No size of the model."""
LAYOUT = Layout({0: (Segment(0, 0, TOKENS),)})
LAYERS = 8
MIDDLE = LAYERS - 2
HIDDEN = 64


def step_memory(checkpointing: bool, keep: str = "never", offload: float = 0.0) -> tuple[int, HostMemory]:
    """Most bytes allocated at once in a step, weights and gradients left out; and what moved."""
    model = patch_model(tiny_llama(num_hidden_layers=LAYERS), loss_chunk_tokens=64).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory = ActivationMemory(model, keep_attention=keep, device="cpu")
    ids = torch.arange(TOKENS)[None] % 128
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        memory.micro_batch(LAYOUT, 0, offload),
    ):
        model(input_ids=ids, shift_labels=ids, layout=LAYOUT, num_items_in_batch=TOKENS).loss.backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events)), memory.host


@pytest.mark.parametrize("offload", [0.25, 1.0])
def test_checkpointed_layers_move_their_input_and_kept_attention(offload: float):
    row = int(offload * TOKENS * HIDDEN * 4)
    _, host = step_memory(True, "never", offload)
    assert host.bytes_to_host == host.bytes_to_device == MIDDLE * row
    _, host = step_memory(True, "always", offload)
    lse = int(offload * TOKENS * 4 * 4)  # float32, 4 heads
    assert host.bytes_to_host == host.bytes_to_device == MIDDLE * (2 * row + lse)


def test_a_layer_moves_what_it_saves_once_and_no_weight():
    """By storage: two norms (input in float32, which is the residual stream itself, a factor, and what the weight
    multiplies), their outputs once for all projections that read them, q, k, v, out, lse, the gated MLP's four."""
    _, host = step_memory(False, offload=1.0)
    norms = 2 * (3 * HIDDEN + 1)
    attention = 2 * HIDDEN + 2 * 32 + 4
    mlp = 4 * 96
    assert host.bytes_to_host == MIDDLE * TOKENS * 4 * (norms + attention + mlp)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_moves_is_free_on_the_device(checkpointing: bool):
    """The peak falls by what all middle layers move, but the two that are there at once where recomputation, not what
    is kept, makes the peak."""
    keep = "always" if checkpointing else "never"
    before, _ = step_memory(checkpointing, keep)
    for offload in (0.5, 1.0):
        peak, host = step_memory(checkpointing, keep, offload)
        assert peak <= before - host.bytes_to_host * (MIDDLE - 2) / MIDDLE
        assert peak >= before - host.bytes_to_host


def saved_and_back(memory: HostMemory, tensors: list[torch.Tensor], **settings: Any) -> list[torch.Tensor]:
    hooks = memory.layer(3, **({"share": 0.5, "rows": {10}, "excluded": ()} | settings))
    with hooks:
        saved = [hooks.put(tensor) for tensor in tensors]
    return [hooks.get(handle) for handle in saved]


def test_views_of_one_storage_share_it_and_keep_their_geometry():
    whole = torch.randn(10, 12)
    views = [whole, whole.t(), whole[2:, 1::3].transpose(0, 1), whole.view(5, 2, 12)[1:], whole[:, 4]]
    memory = HostMemory("cpu")
    back = saved_and_back(memory, views)
    # [8, 4] and [4, 2, 12] have no dimension of 10 rows: they stay as they are.
    assert memory.bytes_to_host == whole.nbytes // 2
    assert all(torch.equal(ours, view) for ours, view in zip(back, views))
    assert [tensor.stride() for tensor in back] == [view.stride() for view in views]
    assert back[0].data_ptr() != whole.data_ptr()
    assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()


def test_a_storage_at_the_address_of_one_that_is_gone_is_another():
    """The allocator gives an address again as soon as the storage is free, which moving makes it."""
    memory = HostMemory("cpu")
    hooks = memory.layer(3, 1.0, {10}, ())
    addresses, saved = set(), []
    with hooks:
        for number in range(50):
            tensor = torch.full((10, 999), float(number))
            addresses.add(tensor.data_ptr())
            saved.append(hooks.put(tensor))
            del tensor
    assert len(addresses) < 50
    assert [float(hooks.get(handle)[9, 998]) for handle in saved] == [float(number) for number in range(50)]


def test_what_is_not_of_tokens_or_belongs_to_others_stays():
    memory = HostMemory("cpu")
    rotations, weight, empty = torch.randn(10, 8), torch.nn.Parameter(torch.randn(8, 8)), torch.randn(10, 0)
    back = saved_and_back(memory, [rotations, weight, empty, torch.arange(10)], excluded=(rotations, weight))
    assert memory.bytes_to_host == 40, "half of ten integers"
    assert back[0].data_ptr() == rotations.data_ptr()
    assert back[1].data_ptr() == weight.data_ptr()
    assert torch.equal(back[3], torch.arange(10))


def test_more_bytes_than_one_piece():
    tensor = torch.arange(10 * (PIECE_BYTES // 64 + 3), dtype=torch.int64).view(10, -1)
    memory = HostMemory("cpu")
    (back,) = saved_and_back(memory, [tensor], share=0.99)
    assert memory.bytes_to_host == int(0.99 * tensor.nbytes) > PIECE_BYTES
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(("ahead", "fetched"), [(0, [4]), (1, [4, 3])])
def test_layers_come_back_one_ahead(ahead: int, fetched: list[int]):
    memory = HostMemory("cpu")
    memory.ahead = ahead
    hooks = {number: memory.layer(number, 1.0 if number < 5 else 0.0, {10}, ()) for number in (2, 3, 4, 5)}
    saved = {}
    for number, layer in hooks.items():
        with layer:
            saved[number] = layer.put(torch.full((10, 2), float(number)))
    hooks[5].get(saved[5])
    assert memory.bytes_to_device == 80 * ahead, "the layer before it is on its way"
    hooks[4].get(saved[4])
    assert memory.bytes_to_device == 80 * len(fetched)
    assert [float(hooks[number].get(saved[number])[0, 0]) for number in (4, 3, 2)] == [4.0, 3.0, 2.0]
    assert memory.bytes_to_device == 240
