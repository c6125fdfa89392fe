"""Where a GPU is that the host is ahead of: events of a stream that this file plays."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hf_longctx.attention.exchange import Pending
from hf_longctx.supervision.device_trail import DeviceTrail
from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.verdict import Sign, verdict
from hf_longctx.supervision.watchdog import Watchdog
from hf_longctx.training.execution import follow_layers
from hf_longctx.training.traced import fake_world
from tests.builders.tiny_models import tiny_llama


class Stream:
    """A device's stream, which runs as far as it is let."""

    def __init__(self) -> None:
        self.recorded = self.ran = self.made = 0

    def event(self) -> Any:
        stream, at = self, [0]
        self.made += 1

        def record() -> None:
            stream.recorded += 1
            at[0] = stream.recorded

        return SimpleNamespace(record=record, query=lambda: at[0] <= stream.ran)


def trained(rank: int, stream: Stream) -> tuple[Progress, Watchdog]:
    """A rank whose host is in layer 31 of backward."""
    progress = Progress(step=3)
    progress.trail = DeviceTrail(stream.event)
    progress.begin("computing")
    progress.begin_micro_batch(1, 1)
    return progress, Watchdog(progress, 600.0)


def wait_for(progress: Progress, ranks: list[int], layer: int) -> None:
    progress.at_layer(layer)
    Pending([SimpleNamespace(wait=lambda: None)], None, ranks, progress).wait()


def position(watchdog: Watchdog) -> Progress:
    watchdog._look_at_device()
    return Progress(**{field.name: watchdog._position()[field.name] for field in fields(Progress)})


def test_the_rank_that_a_device_waits_for_is_known_though_the_host_is_ahead():
    stream = Stream()
    progress, watchdog = trained(0, stream)
    for layer in range(4):
        wait_for(progress, [1 + layer], layer)
    assert progress.awaited == ()
    assert str(position(watchdog)) == "step 3, micro-batch 1 of 1, forward, layer 0, computing", "nothing has run"
    stream.ran = 1
    assert str(position(watchdog)).endswith("layer 0, waiting for keys and values of rank 1")
    moves = progress.moves
    stream.ran = 5
    assert str(position(watchdog)).endswith("layer 2, waiting for keys and values of rank 3")
    assert progress.moves == moves + 2, "what the device passes counts as moves"
    stream.ran = 8
    assert str(position(watchdog)).endswith("layer 3, computing"), "the host's own place"


def test_the_rank_that_does_not_come_is_named_and_not_those_whose_hosts_look_busy():
    """Without the devices' places all three would be named: none of their hosts is known to wait."""
    signs = []
    for rank in range(3):
        stream = Stream()
        progress, watchdog = trained(rank, stream)
        if rank == 1:  # which prepares its data
            progress.begin_step(3)
            progress.begin("loading data")
        else:
            wait_for(progress, [1], 7)
            wait_for(progress, [2 - rank], 30)
            stream.ran = 1
        signs.append(Sign(rank, "host a, pid 1", position(watchdog), idle=60.0, silent=0.0))
    judgement = verdict(signs, 30.0)
    assert judgement is not None
    assert judgement.named == [1]
    assert (
        "Ranks 0, 2: step 3, micro-batch 1 of 1, forward, layer 7, waiting for keys and values of rank 1"
        in judgement.message
    )


def test_events_lie_around_the_gathering_of_each_layers_weights():
    """Forward and backward, where FSDP2 has taken the weights away in between."""
    stream, order = Stream(), list[str]()
    wait_for_unshard = FSDPParamGroup.wait_for_unshard

    def noted(group: Any) -> None:
        if group._all_gather_result is not None:
            order.append("weights")
        wait_for_unshard(group)

    def event() -> Any:
        made = stream.event()
        record = made.record
        made.record = lambda: (order.append("event"), record())
        return made

    progress = Progress(step=1)
    progress.begin_micro_batch(1, 1)
    progress.trail = DeviceTrail(event)
    with fake_world(2, 1), patch.object(FSDPParamGroup, "wait_for_unshard", noted):
        model = tiny_llama()
        layers = model.model.layers
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
        with follow_layers(model, progress):
            hidden = model.model.embed_tokens(torch.tensor([[1, 2]]))
            rotation = model.model.rotary_emb(hidden, torch.tensor([[0, 1]]))
            for layer in layers:
                hidden = layer(hidden, position_embeddings=rotation)
            forward = len(order)
            progress.begin_backward()
            hidden.sum().backward()
    assert order[:forward] == order[forward:] == ["event", "weights", "event"] * len(layers)
    stream.ran = 1
    watchdog = Watchdog(progress, 600.0)
    assert str(position(watchdog)).endswith("forward, layer 0, waiting for weights of ranks 0-1")


def test_events_are_used_again():
    stream = Stream()
    progress, watchdog = trained(0, stream)
    for layer in range(50):
        wait_for(progress, [1], layer % 8)
        stream.ran = stream.recorded
        position(watchdog)
    assert stream.made == 2


def test_an_error_of_the_device_ends_no_thread_that_looks(monkeypatch: pytest.MonkeyPatch):
    """The thread that computes raises it; these still end a run that stands still. They look from the rank's own device."""

    class Broken:
        def record(self) -> None: ...

        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "Event", Broken)
    trail = DeviceTrail()
    trail.end(trail.begin([1], 0, False))
    assert trail.look() == (0, None)
    assert current == [3]
