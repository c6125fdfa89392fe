"""What the server that ranks are forked from imports (rank_launcher.py): all that a rank needs, and the planners, compiled, which
would cost the first ranks of a fresh checkout half a minute."""

import gc

import numpy as np

from hf_longctx.planner import CPU_CORES, PLANNERS, CostModel, Topology
from tests.faulty_run import LENGTHS, LONGEST, train
from tests.tiny_models import tiny_llama

__all__ = ["train"]

_cost = CostModel.from_config(tiny_llama().config, CPU_CORES["amx"]["float32"])
for _planned in PLANNERS.values():
    for _mode in ("async", "lockstep"):
        _plan = _planned(np.array(LENGTHS), Topology(2, LONGEST), _cost, _mode)
        _plan.summary()
        _plan.layouts(0)

gc.collect()
gc.freeze()  # ranks collect their trainers (attention/groups.py), and need not look through all that is imported here
