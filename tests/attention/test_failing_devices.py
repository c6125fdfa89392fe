"""Virtual ranks on a device that fails: the run ends with its error, and nobody waits."""

from typing import Any

import pytest

from hf_longctx.attention import virtual_ranks
from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks


@pytest.mark.parametrize("fails_after", range(1, 7))
def test_a_device_that_fails_ends_the_run(fails_after: int, monkeypatch: pytest.MonkeyPatch):
    """A GPU that has failed answers no question any more, not even for the state of its generator."""
    asked = iter(range(100))
    read, write = virtual_ranks._random_state, virtual_ranks._set_random_state

    def unless_failed(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if next(asked) >= fails_after:
                raise RuntimeError("device-side assert triggered")
            return function(*arguments)

        return call

    monkeypatch.setattr(virtual_ranks, "_random_state", unless_failed(read))
    monkeypatch.setattr(virtual_ranks, "_set_random_state", unless_failed(write))

    def run(exchange: Exchange) -> None:
        """Nothing: what fails is asked at each change of turns."""

    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        run_on_virtual_ranks(3, run)
