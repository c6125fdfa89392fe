"""Seconds of a simulated step, for other processes to compare."""

from dataclasses import replace

from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.planner import Topology, plan_step
from hf_longctx.simulator.lengths import draw
from hf_longctx.simulator.machine import Machine
from hf_longctx.simulator.play import play

LLAMA_7B = ARCHITECTURES["llama-7b"]
H100 = Machine.of(CLUSTERS["h100"], LLAMA_7B)


def seconds_of_a_step() -> str:
    """Return the seconds of a step of 2,000 documents on 512 cards, with all digits."""
    plan = plan_step(draw("byted", 2000, 0), Topology(512, 8192, ranks_per_node=8), H100.cost(LLAMA_7B, 512))
    return play(plan, LLAMA_7B, replace(H100, cards_per_node=2.0)).seconds.hex()
