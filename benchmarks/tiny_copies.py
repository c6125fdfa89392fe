"""A tiny copy of every causal language model of transformers, made by rule: does it build, run, and look at every earlier token?

    python benchmarks/tiny_copies.py --check            # all model types: 2 minutes
    python benchmarks/tiny_copies.py qwen3 gpt_oss      # some, with the fields that were changed

One line for each model type of `AutoModelForCausalLM`, from the default configuration of its class: parameters, CPU seconds to
make the copy, CPU seconds of a forward and backward of 29 tokens, layers that it keeps, and what is wrong. Some defaults lack
what a model of their class needs (a BERT is no decoder by default): COMPLETED holds it, as published configurations have it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_longctx.certificate import CannotShrink, float64_throughout, ordinary_tokens, shrink, tiny_model
from hf_longctx.certificate.tiny_config import TOKENS, forward
from hf_longctx.certificate.tiny_model import causal_lm_class

MOST_PARAMETERS = 2_000_000
MOST_SECONDS = 1.0
"""CPU seconds for a forward and backward of TOKENS tokens: those of a machine that others use, too."""

BERTS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *(
        "prophetnet",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
    ),
)
DECODER = {"is_decoder": True}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMPLETED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(BERTS, DECODER),
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"), ROPE | {"mrope_section": [24, 20, 20]}
        )
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0}},
    "deepseek_v2": {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6, "topk_method": "group_limited_greedy"},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"]) * 5 + ["mamba"] * 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": (["conv"] * 2 + ["full_attention"] + ["conv"]) * 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 64,
    },
    "xlm": {"causal": True},
    "xmod": DECODER | {"languages": ["en_XX"], "default_language": "en_XX"},
}
"""Model type -> what its default configuration lacks."""
COMPLETED["qwen4_exp"] = {"text_config": COMPLETED["qwen4_exp_text"] | {"model_type": "qwen4_exp_text"}}

NOT_TEXT = {
    "gemma3n": "needs timm, which is not installed; its text model is gemma3n_text",
    "gemma4_assistant": "drafter: takes the hidden states of another model",
    "gemma4_unified_assistant": "drafter: takes the hidden states of another model",
    "reformer": "trains on multiples of its chunks only, and of the product of its axial positions",
    "musicgen": "audio codes of several codebooks for input",
    "musicgen_melody": "audio codes of several codebooks for input",
}
"""Model types that are no language models of text alone, and why."""


@dataclass
class Copy:
    """A line of the table."""

    model_type: str
    parameters: int = 0
    layers: tuple[int, ...] = ()
    seconds_to_make: float = 0.0
    seconds_of_step: float = 0.0
    resisted: tuple[str, ...] = ()
    narrowed: dict[str, int] | None = None
    """Operations that gave float32 in a computation of float64."""
    unseen: tuple[int, ...] = ()
    """Tokens whose change moves no later token's logits."""
    wrong: str = ""
    changed: dict[str, Any] | None = None

    @property
    def line(self) -> str:
        remarks = "; ".join(
            [
                *([self.wrong] if self.wrong else []),
                *([f"kept: {', '.join(self.resisted)}"] if self.resisted else []),
                *([f"does not see tokens {self.unseen}"] if self.unseen else []),
                *([f"float32 in {', '.join(self.narrowed)}"] if self.narrowed else []),
            ]
        )
        state = "FAIL" if self.wrong else "kept" if self.resisted else "ok"
        numbers = f"{self.parameters:>9,} {self.seconds_to_make:6.2f} {self.seconds_of_step:6.2f}"
        return f"{state:5}{self.model_type:26}{numbers}  {' '.join(map(str, self.layers)):24} {remarks}"


def configuration(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type](**COMPLETED.get(model_type, {}))


def measured(model_type: str) -> Copy:
    copy = Copy(model_type)
    try:
        config = configuration(model_type)
        cls = causal_lm_class(config)
        begin = time.process_time()
        shrunk = shrink(config, cls)
        copy.seconds_to_make = time.process_time() - begin
        copy.layers, copy.resisted, copy.changed = shrunk.layers, shrunk.resisted, shrunk.changed
        model = tiny_model(shrunk.config, cls=cls)
        copy.parameters = sum(parameter.numel() for parameter in model.parameters())
        run(model, shrunk.config, copy)
    except CannotShrink as error:
        copy.wrong = str(error)[:400]
    except Exception as error:
        copy.wrong = f"{type(error).__name__}: {str(error)[:300]}"
    copy.wrong = copy.wrong.replace("\n", " ")
    return copy


def run(model: Any, config: Any, copy: Copy) -> None:
    """Steps, and finds the tokens that later logits do not depend on, in float64."""
    input_ids = ordinary_tokens(config, TOKENS)[None]
    with float64_throughout() as mode:
        begin = time.process_time()
        logits = forward(model, input_ids=input_ids).logits
        logits[0, :-1].logsumexp(-1).sum().backward()
        copy.seconds_of_step = time.process_time() - begin
        copy.unseen = tuple(unseen_tokens(model.eval(), input_ids))
    copy.narrowed = dict(mode.narrowed)
    if not logits.isfinite().all():
        copy.wrong = "logits are not finite"
    elif not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
        copy.wrong = "gradients are not finite"
    elif copy.parameters > MOST_PARAMETERS:
        copy.wrong = f"more than {MOST_PARAMETERS:,} parameters"
    elif copy.seconds_of_step > MOST_SECONDS:
        copy.wrong = f"a step takes more than {MOST_SECONDS:g} s"


@torch.no_grad()
def unseen_tokens(model: Any, input_ids: torch.Tensor) -> list[int]:
    """Returns the tokens whose change moves none of the later logits."""
    other = ordinary_tokens(model.config, 2 * TOKENS, seed=1)
    before = forward(model, input_ids=input_ids).logits
    unseen = []
    for token in range(TOKENS - 1):
        changed = input_ids.clone()
        changed[0, token] = other[token] if other[token] != input_ids[0, token] else other[-1]
        if torch.equal(forward(model, input_ids=changed).logits[0, token + 1 :], before[0, token + 1 :]):
            unseen.append(token)
    return unseen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="copy these model types (default: all)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a model type has no tiny copy")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    copies = []
    for model_type in arguments.model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in NOT_TEXT:
            print(f"-    {model_type:26}{NOT_TEXT[model_type]}", flush=True)
            continue
        copies.append(measured(model_type))
        print(copies[-1].line, flush=True)
        if arguments.model_types:
            print(f"     {copies[-1].changed}")
    summarise(copies)
    if arguments.json:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__, "command": sys.argv}
        arguments.json.write_text(json.dumps(versions | {"copies": [asdict(copy) for copy in copies]}, indent=1))
    if arguments.check and any(copy.wrong for copy in copies):
        raise SystemExit(1)


def summarise(copies: list[Copy]) -> None:
    small = [c for c in copies if not c.wrong and not c.resisted]
    kept = [c for c in copies if not c.wrong and c.resisted]
    print(
        f"\n{len(copies)} model types: {len(small)} with every size small, {len(kept)} with some fields as they were, "
        f"{len(copies) - len(small) - len(kept)} without a tiny copy. transformers {transformers.__version__}"
    )
    if copies:
        makes, steps = sorted(c.seconds_to_make for c in copies), sorted(c.seconds_of_step for c in copies)
        print(
            f"CPU seconds to make one: median {makes[len(makes) // 2]:.2f}, longest {makes[-1]:.2f}; of a step: median "
            f"{steps[len(steps) // 2]:.2f}, longest {steps[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
