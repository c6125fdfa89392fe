"""What it is worth to plan with labels: batches in which only some tokens of each document have one.

    python benchmarks/planner_labels.py --json FILE --check labels        # a minute
    python benchmarks/planner_labels.py --documents 200 --draws 1     # a quick look

The output head computes nothing for a token without a label, so of two conversations of the same length, the one in which
less is learned takes less time. Each batch is planned twice: with the labels of its documents, and as if every token had
one. Both plans are then run with the times that the documents really take by the cost model, head and all (no planner's
equivalent length). The share of labels is drawn for each document, from a beta distribution with most of its weight near none
and near all: answers of tools that nobody learns, and texts of which all is learned.

- without labels, over ours: makespan of the plan that ignores labels over that of the plan that knows them; median of all draws.
- over the lower bound: makespan of the plan that knows them, over the bound of its step; median.
"""

import os
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from planner_before import with_times
from report import conclude, parser

from hf_longctx.planner import GPU, CostModel, Mode, StepPlan, Topology, plan_step
from hf_longctx.planner.cost.cost_model import PS_PER_NS
from hf_longctx.simulator.lengths import draw

MODELS = {
    "0.6B, vocabulary of 152K": SimpleNamespace(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "8B, vocabulary of 128K": SimpleNamespace(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14_336,
        vocab_size=128_256,
    ),
}
"""Qwen3's and Llama 3's sizes."""
DISTRIBUTIONS = ("agent_trajectories", "verl_1k_16k")
MODES: tuple[Mode, ...] = ("async", "lockstep")
RANKS, CAPACITY, RANKS_PER_NODE = 64, 16_384, 8
SHARES = (0.5, 0.7)
"""Of the beta distribution: 42 % of tokens have a label on average, of 18 % of the documents less than 5 % of them."""


def real(plan: StepPlan, cost: CostModel, labels: np.ndarray) -> int:
    """Return the makespan of a plan whose documents take what they compute, nanoseconds. labels: int64 [documents]."""
    predicted = cost.time(plan.length, plan.ranks_of_document)
    saved = (plan.length - labels[plan.doc]) * cost.label_ps / PS_PER_NS / plan.ranks_of_document
    factors = np.ones(len(plan.doc))
    factors[plan.doc] = (predicted - saved) / predicted
    return with_times(plan, cost, factors).timeline().makespan


def measured(documents: int, draws: int) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Rows and figures of all models, distributions and modes."""
    rows, figures = [], {}
    topology = Topology(RANKS, CAPACITY, ranks_per_node=RANKS_PER_NODE)
    for model, config in MODELS.items():
        cost = CostModel.from_config(config, GPU, ranks_per_node=RANKS_PER_NODE, world_size=RANKS)
        for distribution in DISTRIBUTIONS:
            for mode in MODES:
                gains, balances = [], []
                for seed in range(draws):
                    lengths = draw(distribution, documents, seed)
                    labels = (lengths * np.random.default_rng(seed).beta(*SHARES, documents)).astype(np.int64)
                    plan = plan_step(lengths, topology, cost, mode, labels=labels)
                    ours = real(plan, cost, labels)
                    gains.append(real(plan_step(lengths, topology, cost, mode), cost, labels) / ours)
                    balances.append(ours / plan.lower_bound)
                gain, balance = statistics.median(gains), statistics.median(balances)
                rows.append(
                    {
                        "batch": f"{documents} documents, {distribution}, on {RANKS} ranks of {CAPACITY:,} tokens",
                        "model": model,
                        "mode": mode,
                        "without labels, over ours": f"{gain:.3f}",
                        "over the lower bound": f"{balance:.3f}",
                    }
                )
                figures[f"labels/{model}/{distribution}/{mode}/makespan without labels over ours"] = gain
    return rows, figures


def main() -> int:
    arguments = _arguments()
    load = os.getloadavg()[0]
    rows, figures = measured(arguments.documents, arguments.draws)
    return conclude(arguments, rows, figures, load, section="batch")


def _arguments() -> Any:
    options = parser(__doc__)
    options.add_argument("--documents", type=int, default=1000, help="of a batch (default: %(default)s)")
    options.add_argument("--draws", type=int, default=5, help="batches of each kind (default: %(default)s)")
    arguments = options.parse_args()
    if arguments.documents < 1 or arguments.draws < 1:
        options.error("--documents and --draws must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
