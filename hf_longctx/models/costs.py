"""The cost of a model before anything was measured: counted from its configuration, or guessed from its weights.

Nothing is sent: the same configuration and speeds give every rank the same cost model.
"""

from typing import Any

from hf_longctx.hardware.model_sizes import flops_of_weights
from hf_longctx.hardware.speeds import RankSpeed
from hf_longctx.models.stages import whole_parameters
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.topology import Topology


def counted_cost(model: Any, speed: RankSpeed, topology: Topology) -> CostModel:
    """Count FLOPs and bytes of a model's configuration. Raises ValueError, with the reason, where it cannot be counted."""
    config = model.config.get_text_config()
    return CostModel.from_config(config, speed, **_of(topology))


def guessed_cost(model: Any, speed: RankSpeed, topology: Topology) -> CostModel:
    """Guess the cost of a model that cannot be counted from how many weights and heads it has."""
    parameters = sum(weight.numel() for weight in whole_parameters(model).values())
    flops = flops_of_weights(parameters, model.config.get_text_config())
    return CostModel.from_flops(flops, speed, **_of(topology))


def _of(topology: Topology) -> dict[str, Any]:
    return {name: getattr(topology, name) for name in ("ranks_per_node", "world_size", "capacity")}
