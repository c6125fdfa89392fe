"""Which causal language models of transformers are computed exactly: the certificate of every model type, a line each.

    python benchmarks/model_coverage.py --json benchmarks/results/model_coverage.json --check      # 10 minutes
    python benchmarks/model_coverage.py --types qwen3 mamba                                         # a few

Each type's default configuration (decoders of BERT's kind with is_decoder=True) is shrunk by rule and certified, as
`hf_longctx.patch_model` does with a real one: loss and gradients of packed documents, split over two and four virtual ranks, or
whole on two, beside the plain model on each document alone, in float64.

    split     documents over any ranks, masks carry the layout
    whole     documents packed, whole on a rank: layers with a state, or that count rows, run document by document
    own       likewise, and so does attention, which is code of the model's own
    refused   differs, or no tiny copy of it could be tested; the reason is given
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from report import conclude, parser

MOST_USED = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma"),
    *(
        "gemma2",
        "gemma3_text",
        "gemma3",
        "gemma4_text",
        "gpt_oss",
        "glm",
        "glm4",
        "glm4_moe",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
    ),
    *("smollm3", "deepseek_v3", "phi", "phi3", "phimoe", "granite", "granitemoe", "cohere", "cohere2", "starcoder2"),
    *("stablelm", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "mamba", "llama4_text"),
)
"""Families that people fine-tune: each must be exact."""
CLASSES = ("split", "whole", "own", "refused")


@dataclass(frozen=True)
class Line:
    """What is known of a model type."""

    model_type: str
    kind: str
    """One of CLASSES."""
    error: float
    seconds: float
    reason: str
    tested: bool


def default_configuration(model_type: str) -> Any:
    """The configuration of a type, as a decoder."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def certified(model_type: str) -> Line:
    """Certify the default configuration of a type."""
    import torch
    from transformers.utils import logging

    from hf_longctx.certificate.certificate import certificate_of
    from hf_longctx.certificate.tiny_model import causal_lm_class, own_configuration

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        config = default_configuration(model_type)
        cls = causal_lm_class(config)
        model = cls.__new__(cls)  # a class and a configuration are all that a certificate is about
        model.__dict__["config"] = own_configuration(cls, config)
        certificate = certificate_of(model)
    except Exception as error:
        seconds = time.perf_counter() - begin
        reason = f"no default configuration: {type(error).__name__}: {error}"
        return Line(model_type, "refused", float("nan"), seconds, reason, False)
    traits = certificate.traits
    kind = "split" if traits.splits_documents else "whole" if traits.in_masks else "own"
    return Line(
        model_type,
        kind if certificate.exact else "refused",
        certificate.error,
        certificate.seconds,
        "" if certificate.exact and traits.in_masks else certificate.reason,
        certificate.tested,
    )


def main() -> int:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--types", nargs="+", metavar="TYPE", help="default: all of AutoModelForCausalLM")
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    arguments = options.parse_args()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    load = os.getloadavg()[0]
    types = arguments.types or list(NAMES)
    lines = []
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for line in pool.map(certified, types):
            lines.append(line)
            print(
                f"{line.model_type}: {line.kind} {line.error:.1e} {line.seconds:.1f} s {line.reason[:120]!r}",
                file=sys.stderr,
            )
    counts = Counter(line.kind for line in lines)
    exact = [line for line in lines if line.kind != "refused"]
    figures: dict[str, float] = {f"model types/{kind}": counts[kind] for kind in CLASSES}
    figures |= {
        "model types/all": len(lines),
        "model types/exact": len(exact),
        "model types/refused without a reason": sum(line.kind == "refused" and not line.reason for line in lines),
        "model types/of the most used, refused": sum(
            line.kind == "refused" for line in lines if line.model_type in MOST_USED
        ),
        "error/largest among exact": max((line.error for line in exact), default=0.0),
        "seconds/most of one": max(line.seconds for line in lines),
    }
    rows = [
        {
            "class": line.kind,
            "model type": line.model_type,
            "error": f"{line.error:.1e}",
            "seconds": f"{line.seconds:.1f}",
            "reason": " ".join(line.reason.split())[:200],
        }
        for line in sorted(lines, key=lambda line: (CLASSES.index(line.kind), line.model_type))
    ]
    return conclude(arguments, rows, figures, load, section="class")


if __name__ == "__main__":
    sys.exit(main())
