"""Deals decoder layers out to the stages of a pipeline, so that all stages take about equally long.

A layer costs what its weights and its attention cost a token, the output head with its loss 2 FLOPs an entry of its
matrix, on the last stage. Embeddings are looked up: free. With n equal layers and a head that is worth h of them:

    32 layers, 4 stages, h = 2.4:     8.6 each would be even      9 + 9 + 8 + 6

No torch; nothing is sent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hf_longctx.hardware.model_sizes import ModelSizes, model_flops, squares
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.planner.topology import FULL

TYPICAL_LENGTH = 8192
"""Tokens of the documents for which layers are spread where nothing says how long they are."""


def stage_layers(config: Any, stages: int, length: int) -> list[range]:
    """The layers of each stage, in order.

    Args:
        config: of the Hugging Face model.
        stages: of the whole pipeline, virtual ones included.
        length: tokens of a typical document: attention makes layers dearer, the head stays.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers, head = _relative_costs(config, length)
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages of {layers} layers: every stage needs a layer. Valid: 1 to {layers} stages")
    if stages == 1:
        return [range(layers)]
    before = stages - 1

    def slowest(last: int) -> tuple[float, int]:
        return max(-(-(layers - last) // before), last + head), -last

    last = min(range(1, layers - before + 1), key=slowest)
    counts = [(layers - last) // before + (stage < (layers - last) % before) for stage in range(before)] + [last]
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts)]


def describe_stages(config: Any, layers: list[range], length: int) -> str:
    """Put stages into words: layers 17 + 13, which cost 95 % + 105 % of a stage's mean."""
    counts, shares = (len(stage) for stage in layers), (weight / 10 for weight in stage_weights(config, layers, length))
    percentages = " + ".join(f"{share:.0f} %" for share in shares)
    return f"layers {' + '.join(map(str, counts))}, which cost {percentages} of a stage's mean"


def stage_weights(config: Any, layers: list[range], length: int) -> list[int]:
    """Return what each stage costs, per mille of the mean stage."""
    _, head = _relative_costs(config, length)
    costs = [float(len(stage)) for stage in layers]
    costs[-1] += head
    return [max(1, round(FULL * cost * len(costs) / sum(costs))) for cost in costs]


def fullest_share(config: Any, stages: int, virtual: int = 1, length: int = TYPICAL_LENGTH) -> float:
    """Return, of all weights, the share that the device with most of them holds: embeddings lie in the first stage, the output
    head in the last, and both have them where they are one weight.

    Args: as of stage_layers; `virtual`: stages on each of `stages` devices.
    """
    if stages == 1:
        return 1.0
    sizes = ModelSizes.of(config, 1)
    layers = stage_layers(config, stages * virtual, length)
    of_layer = [sizes.layer_parameters] * sizes.layers
    if sizes.counted is not None:
        of_layer = [layer.parameters for layer in sizes.counted.layers]
    per_device = [
        sum(of_layer[index] for stage in layers[device::stages] for index in stage) for device in range(stages)
    ]
    head = sizes.head_rows * sizes.hidden
    per_device[0] += head
    per_device[-1] += head
    return max(per_device) / sizes.parameters


def most_in_flight(config: Any, stages: int, virtual: int = 1, length: int = TYPICAL_LENGTH) -> tuple[int, int, int]:
    """Return how many full micro-batches a device of a pipeline has between forward and backward at most, how many layers'
    activations they keep there together: of 9 + 9 + 8 + 6 layers, 4 of the first device keep 36, not 32; and how many layers a
    stage has at most.

    Args: as of fullest_share.
    """
    if stages == 1:
        return 1, 0, 0
    layers = stage_layers(config, stages * virtual, length)
    schedule = Schedule("interleaved", virtual) if virtual > 1 else Schedule()
    in_flight = schedule.most_in_flight(stages)
    of_device = np.array([sum(map(len, layers[device::stages])) for device in range(stages)])
    most = math.ceil((in_flight * of_device).max() / virtual)
    return math.ceil(in_flight.max() / virtual), most, max(map(len, layers))


def _relative_costs(config: Any, length: int) -> tuple[int, float]:
    """Layers, and how many of them the output head is worth."""
    flops, tokens = model_flops(config), np.array([length])
    attention = flops.of_attention(*(float(squares(tokens, window)[0]) / length for window in (None, flops.window)))
    return flops.layers, flops.head / ((flops.linear - flops.head + attention) / flops.layers)
