"""Qwen3-8B's widths on an accelerator that is not there (fake_accelerator.py): what attention's kernel is given, what is too
large, what waits for the device, and that a tensor on another device is an error."""

import json

import pytest

from tests.worlds.launched import run


@pytest.mark.processes
def test_two_layers_of_qwen3_8b_give_the_kernel_what_it_takes_and_make_nothing_large():
    """bfloat16, 32 query and 8 key-value heads of 128, one document over two ranks and five whole ones; with checkpointing, so
    that forward runs twice."""
    ended = run("tests/attention/fake_accelerator.py")
    assert ended.code == 0, ended.output
    seen = json.loads(ended.output.strip().splitlines()[-1])
    ranks, layers = 2, 2
    forward, backward = 2 * ranks * layers, ranks * layers
    assert seen["calls"] == {
        "forward causal": forward,
        "forward full": forward,
        "backward causal": backward,
        "backward full": backward,
    }
    assert seen["too_large"] == []
    assert seen["waits"] == {"nonzero": ranks}, "the rows with a label are found once a forward, after all layers"
    assert min(seen["bytes_sent"]) > 0
    assert seen["planted"] == {
        "too_large": 2,
        "waits": 1,
        "refused": ["DataDependentOutputException", "two devices"],
    }
