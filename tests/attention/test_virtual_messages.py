"""Messages between virtual ranks: they wait, keep their order and fail as those of processes do, and never hang."""

import threading
from typing import Any

import pytest
import torch

from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.virtual_ranks import DeadlockError, run_on_virtual_ranks


def send(exchange: Exchange, value: float, to: int) -> Any:
    return exchange.start([(torch.full((2,), value), to)], [])


def receive(exchange: Exchange, source: int, **settings: Any) -> torch.Tensor:
    arrived = torch.empty(2)
    exchange.start([], [(arrived, source)], **settings).wait()
    return arrived


def test_a_buffer_may_be_written_once_its_send_is_complete():
    def run(exchange: Exchange) -> list[float]:
        if exchange.rank == 0:
            buffer = torch.zeros(2)
            for value in (1.0, 2.0, 3.0):
                buffer.fill_(value)
                exchange.start([(buffer, 1)], []).wait()
            return []
        return [float(receive(exchange, 0)[0]) for _ in range(3)]

    assert run_on_virtual_ranks(2, run)[1] == [1.0, 2.0, 3.0]


def test_the_first_failure_is_raised_and_the_others_leave():
    left = []

    def run(exchange: Exchange) -> None:
        try:
            if exchange.rank == 1:
                raise KeyError("planted")
            receive(exchange, 1)
        finally:
            left.append(exchange.rank)

    with pytest.raises(KeyError, match="planted") as raised:
        run_on_virtual_ranks(3, run)
    assert raised.value.__notes__ == ["This was raised on virtual rank 1 of 3."]
    assert sorted(left) == [0, 1]  # rank 2 had not begun
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("virtual rank")]


def test_a_deadlock_is_named_at_once():
    def run(exchange: Exchange) -> None:
        if exchange.rank < 2:
            receive(exchange, 1 - exchange.rank, gradients=exchange.rank == 1)

    with pytest.raises(DeadlockError) as raised:
        run_on_virtual_ranks(3, run, ranks_per_node=1)
    assert str(raised.value) == (
        "no virtual rank can go on: rank 0 waits to receive float32 [2] from rank 1; "
        "rank 1 waits to receive float32 [2] (gradients) from rank 0; rank 2 ended"
    )


def test_a_send_waits_for_its_receive():
    """Two ranks that both send first, each in a batch of its own, meet on gloo's small messages only by luck."""

    def run(exchange: Exchange) -> torch.Tensor:
        send(exchange, 1.0, 1 - exchange.rank).wait()
        return receive(exchange, 1 - exchange.rank)

    with pytest.raises(DeadlockError, match=r"rank 0 waits to send float32 \[2\] to rank 1; rank 1 waits to send"):
        run_on_virtual_ranks(2, run)


def test_operations_of_one_direction_run_in_order():
    """Rank 0 sends to 1, then to 2; rank 2 must hear from it before it sends to 1, for which 1 waits first: NCCL hangs."""

    def run(exchange: Exchange) -> None:
        if exchange.rank == 0:
            pending = [send(exchange, 1.0, 1), send(exchange, 2.0, 2)]
            for operation in reversed(pending):
                operation.wait()
        elif exchange.rank == 1:
            receive(exchange, 2)
            receive(exchange, 0)
        else:
            receive(exchange, 0)
            send(exchange, 3.0, 1).wait()

    with pytest.raises(
        DeadlockError, match=r"rank 0 waits to send .* to rank 1, which it started before what it waits for"
    ):
        run_on_virtual_ranks(3, run)


def test_the_two_directions_between_nodes_do_not_wait_for_each_other():
    """Inside a node they share a group, in which a rank's messages run in order."""

    def run(exchange: Exchange) -> list[float]:
        if exchange.rank == 0:
            forward = torch.empty(2)
            pending = exchange.start([], [(forward, 1)])
            gradients = receive(exchange, 1, gradients=True)
            pending.wait()
            return [float(forward[0]), float(gradients[0])]
        exchange.start([(torch.full((2,), 5.0), 0)], [], gradients=True).wait()
        send(exchange, 4.0, 0).wait()
        return []

    assert run_on_virtual_ranks(2, run, ranks_per_node=1)[0] == [4.0, 5.0]
    with pytest.raises(DeadlockError, match=r"which it started before what it waits for"):
        crossed_inside_a_node()


def crossed_inside_a_node() -> None:
    """Rank 0 starts to receive keys and then waits for gradients; rank 1 sends these first, of another size."""

    def run(exchange: Exchange) -> None:
        if exchange.rank == 0:
            exchange.start([], [(torch.empty(2), 2)])
            receive(exchange, 1, gradients=True)
        elif exchange.rank == 1:
            exchange.start([(torch.full((2,), 5.0), 0)], [], gradients=True).wait()
            send(exchange, 4.0, 2).wait()
        else:
            receive(exchange, 1)
            send(exchange, 4.0, 0).wait()

    run_on_virtual_ranks(3, run)


def test_messages_left_behind_are_named():
    def run(exchange: Exchange) -> None:
        if exchange.rank == 0:
            send(exchange, 1.0, 1)

    with pytest.raises(RuntimeError, match=r"left messages behind: rank 0 still had to send float32 \[2\] to rank 1"):
        run_on_virtual_ranks(2, run)


@pytest.mark.parametrize(
    ("operations", "match"),
    [
        (lambda rank: ([(torch.ones(3), 1)], []), r"rank 0 sends float32 \[3\] where rank 1 expects float32 \[2\]"),
        (lambda rank: ([(torch.ones(2).double(), 1)], []), r"sends float64 \[2\] where rank 1 expects float32"),
        (lambda rank: ([(torch.ones(2), 0)], []), r"rank 0 exchanges a message with rank 0; valid are .* \[1\]"),
        (lambda rank: ([(torch.ones(2), 2)], []), "rank 0 exchanges a message with rank 2"),
        (lambda rank: ([(torch.ones(2, 2).t(), 1)], []), "must be contiguous and on cpu"),
        (lambda rank: ([(torch.ones(2, device="meta"), 1)], []), "must be contiguous and on cpu"),
    ],
)
def test_messages_that_cannot_travel_are_refused(operations: Any, match: str):
    def run(exchange: Exchange) -> None:
        exchange.start(*operations(0)).wait() if exchange.rank == 0 else receive(exchange, 0)

    with pytest.raises(ValueError, match=match):
        run_on_virtual_ranks(2, run)


def test_worlds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="world_size=0: there is at least one virtual rank"):
        run_on_virtual_ranks(0, print)
    with pytest.raises(ValueError, match="ranks_per_node=0: a node has at least one rank"):
        run_on_virtual_ranks(2, print, ranks_per_node=0)
