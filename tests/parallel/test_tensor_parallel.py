"""Tensor parallelism by transformers' own plan, together with Ulysses and the direct exchange, on 4 gloo ranks: 2 x 2.

The mesh is (fsdp, tp): global ranks 0 and 2 hold one half of the heads, 1 and 3 the other. FSDP2 averages gradients over
its 2 ranks, so that their mean times 2 is the gradient of the document.
"""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import hf_longctx
from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.ulysses import split_heads
from hf_longctx.layouts.layout import Layout, zigzag
from tests.builders.tiny_models import tiny_llama
from tests.builders.transformers_versions import skip_unless_loaded
from tests.worlds.rank_pool import RankPool, worker_state

MESH = {"fsdp_size": 2, "tp_size": 2}
TOKENS = 101
NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight")


def documents() -> torch.Tensor:
    return torch.arange(TOKENS) * 7 % 97


def loss_and_gradients(folder: str, ulysses: int) -> tuple[float, dict[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    if "exchange of heads" not in worker_state:
        worker_state["exchange of heads"] = Exchange(groups=[[0, 2], [1, 3]])
    exchange = worker_state["exchange of heads"]
    mesh = DistributedConfig(**MESH)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=mesh, dtype=torch.float64)
    hf_longctx.patch_model(model)
    layout = Layout(zigzag(0, TOKENS, (0, 1)), ulysses)
    rows = torch.from_numpy(layout.positions(exchange.rank))
    following = torch.cat([documents()[1:], torch.tensor([-100])])
    out = model(
        input_ids=documents()[rows][None],
        shift_labels=following[rows][None],
        num_items_in_batch=TOKENS - 1,
        layout=layout,
        exchange=exchange,
    )
    out.loss.backward()
    parameters = dict(model.named_parameters())
    return float(out.loss.detach()), {name: 2 * parameters[name].grad.full_tensor() for name in NAMES}


@pytest.mark.parametrize("ulysses", [1, 2])
def test_heads_split_by_tensor_parallelism_and_again_by_ulysses(ranks4: RankPool, tmp_path: Path, ulysses: int):
    skip_unless_loaded(MESH)
    model = tiny_llama(torch.float64)
    model.save_pretrained(tmp_path)
    logits = model(input_ids=documents()[None]).logits[0, :-1]
    loss = cross_entropy(logits, documents()[1:])
    loss.backward()
    answers = ranks4.run(loss_and_gradients, str(tmp_path), ulysses)
    for first, second in ((0, 2), (1, 3)):
        assert answers[first][0] + answers[second][0] == pytest.approx(float(loss.detach()), rel=1e-10)
    parameters = dict(model.named_parameters())
    for _, gradients in answers:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, parameters[name].grad, rtol=0, atol=1e-10)


def test_degrees_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(
        ValueError, match=r"ulysses=4 must divide the 6 query heads .*6 = 1 \* 4 \+ 2; with tensor.*: \[1, 2, 3, 6\]"
    ):
        split_heads(6, 2, 4)
    with pytest.raises(ValueError, match="ulysses=0"):
        split_heads(6, 2, 0)


def test_key_value_heads_go_only_where_they_are_read():
    assert split_heads(8, 2, 4).kv_heads == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert split_heads(8, 8, 2).kv_heads == ((0, 4), (4, 8))
    assert not split_heads(8, 8, 2).replicated
    assert split_heads(8, 2, 4).repeats == (None,) * 4
    uneven = split_heads(12, 3, 2)  # 6 query heads each: 4 of one key/value head and 2 of the next
    assert uneven.kv_heads == ((0, 2), (1, 3))
    assert uneven.repeats == ((2, 1), (1, 2))
    assert uneven.replicated
