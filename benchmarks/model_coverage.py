"""Which causal language models of transformers are computed exactly: the certificate of every model type, a line each.

    python benchmarks/model_coverage.py --json benchmarks/results/model_coverage.json --check      # 10 minutes
    python benchmarks/model_coverage.py --types qwen3 mamba                                         # a few

Each type's default configuration (with what defaults lack of published ones: tiny_copies.py) is shrunk by rule and certified, as
`hf_longctx.patch_model` does with a real one: loss and gradients of packed documents, split over two and four virtual ranks, or
whole on two, or one to a micro-batch on up to four, beside the plain model on each document alone, in float64.

    split     documents over any ranks, masks carry the layout
    whole     documents packed, whole on a rank: layers with a state, or that count rows, run document by document
    own       likewise, and so does attention, which is code of the model's own
    alone     one whole document to a micro-batch, with the plain model
    refused   differs, or no tiny copy of it could be tested; the reason is given

And what attn_implementation="longctx" alone, without `patch_model`, does with a layout and without one: exact, or refused.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from report import conclude, parser

from hf_longctx.certificate.exactness import TOLERANCE, TOLERANCE_OF_CASTS

if TYPE_CHECKING:
    from hf_longctx.models.traits import Traits

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
PAGE = """# Supported models

*Written by `benchmarks/model_coverage.py --page docs/models.md`, with transformers {transformers} and torch {torch}: each
type's default configuration, shrunk by rule.*

Of the {all} causal language model types of transformers, {exact} are computed exactly: loss and every gradient equal those
of the plain model on each document alone, in float64, to rounding. Nothing here knows a family by name, but for the
attention classes of Llama, Mistral, Mixtral, BLOOM and MPT.

How: the attention mask carries the layout. While a model runs over a layout, the masks that transformers makes are stand-ins
that hold the layout and what the mask means (causal, a window, chunks: its function is asked about a few pairs of
positions), and every attention layer hands its mask to our attention function. Whoever computes with such a mask is refused
by name. Modules that let documents see each other by other means (a state, a convolution, row numbers) are found by running
them, and run document by document.

The **certificate**: before a model runs over a layout, `patch_model` (and so the trainer and `train`) makes a tiny random copy
of its configuration and class and runs it on two and four virtual ranks, packed, split and permuted, with activation
checkpointing, beside the plain model. Accepted is a difference of 1e-9 of the largest gradient, or of 1e-6 where modeling code
casts to float32; the certificate then names the casts. It covers text, and classes, configuration and code (of the model, of
transformers, and ours); not the weights, and it runs on CPU in float64. `report.html`, `run.json` and the model card of a run
quote it.

- **Kept**: as JSON in `certificates` of the cache (`$HF_LONGCTX_CACHE`, else `~/.cache/hf_longctx`), under a name made of
  configuration, class, all code and the versions of torch and transformers. Where one of these changes, another is made.
  `hf-longctx certify MODEL` always makes a new one. In a distributed run rank 0 makes or reads it, and tells the others.
- **As a run computes**: the trainer runs the copy once more on its device, in its precision, with its kernels. What differs by
  more than 4 times the rounding of the plain model there (or 16 eps of the dtype, if that is more) is refused, and so is a copy
  that fails where the plain one runs. Where rounding hides too much, the plain copy does not run so either, or a kernel takes no
  heads as small as the copy's, the certificate says that this is not covered; nor are the stages of a pipeline.
- **In half precision** no layout makes a model less exact: over 150 types on CPU in bfloat16 and float16, split or whole,
  gradients are as far from float64 as the plain model's are, but for chance. Two runs of a mixture of experts differ all the
  same: experts that are about as good are chosen otherwise after any rounding. A tiny gpt-oss under autocast is 6 % off in its
  gradients for this, the plain one and ours alike, and 2 % where every expert is taken.
- **Could not be tested**: the rule found no small sizes that the class takes. `hf-longctx certify MODEL --config tiny.json`
  tests yours: a JSON object with those fields of `config.json` that are to be smaller. Switches must stay as they are.
  Training finds the certificate in the cache (that of rank 0's machine), as long as it asks for the same configuration.
- **Uncertified**: `model.uncertified: true`, or `patch_model(model, uncertified=True)`, trains a model that could not be tested,
  with a warning: the plain model runs, on one whole document in a micro-batch. The card says so. `hf-longctx evaluate` and
  `generate` take such a model with `--uncertified`. A model that was tested and differs is refused in any case.

Llama, Mistral, Mixtral, BLOOM and MPT are compared by the project's tests in every mode of training. The trainer and `hf-longctx
certify` certify them like any other; `patch_model` alone, and a copy that cannot be made, leave it at the tests.

Over a layout a model is given token ids, and no images or sound: other inputs are refused there, and computed without a layout.

**How long**: {limited_count} types have a table of positions, which ends, and no document may be longer. The certificate finds
the end by running the copy, and the field that sets it by making copies with that field smaller, whatever its name is
(`n_positions`; `max_position_embeddings`, less 2 in RoBERTa and its kin). A longer document is refused before training, and by
`score`, `prefill`, `evaluate` and `generate`; `long_documents` cuts it ([settings](settings.md)). Rotary embeddings and ALiBi
have no end. These have one: {limited}.

**How exact**: {precision}

## Split: documents over any ranks ({split_count})

{split}

## Whole: packed, but whole on a rank ({whole_count})

{whole}

## Whole, with attention of their own ({own_count})

They choose by themselves which keys a query sees, so that masks of tokens by tokens are built for each micro-batch.

{own}

## Alone: one whole document to a micro-batch ({alone_count})

No layout reaches their attention: positions are numbers of rows, masks are made without transformers' functions, patches are
laid over rows. The plain model runs, on one whole document in a micro-batch, and ranks take different documents, planned and
balanced as ever. It may drop attention probabilities, which others may not. The loss is the cross-entropy of its logits for
the next token, whatever else the class adds to a loss of its own (ProphetNet: the tokens after the next). Logits exist a few
rows at a time, as elsewhere, but where a class does not make them of hidden states alone (GIT, ProphetNet) all of a
document's exist at once: tokens x vocabulary x 4 bytes, about 1 GB for 8,192 tokens and a vocabulary of 32,000, and as much
for their gradient.

{alone}

## Refused

| Model type | | Reason |
|---|---|---|
{refused}

"Not tested" means that no tiny copy of the default configuration could be made; a checkpoint's own configuration may have
one. A model that is not causal by default may be so with another switch: XLNet with `attn_type="uni"` runs alone.
"""

CLASSES = ("split", "whole", "own", "alone", "refused")


@dataclass(frozen=True)
class Line:
    """What is known of a model type."""

    model_type: str
    kind: str
    """One of CLASSES."""
    error: float
    seconds: float
    """CPU seconds of the certificate, which runs on one thread: those of a machine that others use, too."""
    reason: str
    tested: bool
    registered: tuple[str, str] = ("-", "-")
    """See registered.py."""
    casts: tuple[str, ...] = ()
    """Operations whose casts to float32 leave more than 1e-9; see Certificate."""
    positions: str = ""
    """The longest document that the default configuration has positions for; empty: any, or none is known."""


def certified(model_type: str) -> Line:
    """Certify the default configuration of a type."""
    from registered import registered  # which imports torch
    from tiny_copies import configuration
    from transformers.utils import logging

    from hf_longctx.certificate import new_certificate
    from hf_longctx.certificate.tiny_model import causal_lm_class, own_configuration

    logging.set_verbosity_error()
    begin = time.process_time()
    try:
        config = configuration(model_type)
        cls = causal_lm_class(config)
        certificate = new_certificate(cls, own_configuration(cls, config))
        seconds = time.process_time() - begin
    except Exception as error:
        seconds = time.process_time() - begin
        reason = f"no default configuration: {type(error).__name__}: {error}"
        return Line(model_type, "refused", float("nan"), seconds, reason, False)
    return Line(
        model_type,
        kind_of(certificate.traits) if certificate.exact else "refused",
        certificate.error,
        seconds,
        certificate.reason,
        certificate.tested,
        registered(cls, own_configuration(cls, config)),
        certificate.casts,
        str(certificate.traits.positions or ""),
    )


def kind_of(traits: "Traits") -> str:
    """Return the class of a model that is exact with these traits."""
    return "own" if traits.documents == "whole" and not traits.in_masks else traits.documents


def page(lines: Sequence[Line]) -> str:
    """Return docs/models.md: what the classes mean, and the types of each."""
    by_name = sorted(lines, key=lambda line: line.model_type)
    of = {kind: [line for line in by_name if line.kind == kind] for kind in CLASSES}
    refused = "\n".join(
        f"| `{line.model_type}` | {'tested' if line.tested else 'not tested'} | {_one_line(line.reason)} |"
        for line in of["refused"]
    )
    return PAGE.format(
        transformers=version("transformers"),
        torch=version("torch").partition("+")[0],
        all=len(lines),
        exact=len(lines) - len(of["refused"]),
        refused=refused,
        limited=", ".join(f"`{line.model_type}`" for line in by_name if line.positions),
        limited_count=sum(bool(line.positions) for line in by_name),
        precision=_precision([line for line in by_name if line.kind != "refused"]),
        **{kind: ", ".join(f"`{line.model_type}`" for line in of[kind]) for kind in CLASSES[:-1]},
        **{f"{kind}_count": len(of[kind]) for kind in CLASSES[:-1]},
    )


def _precision(exact: Sequence[Line]) -> str:
    """Say how near the plain model the exact types are, and which casts keep some of them farther."""
    near = [line for line in exact if line.error <= TOLERANCE]
    far = [f"`{line.model_type}` ({line.error:.0e}: {', '.join(line.casts)})" for line in exact if line not in near]
    count = f"{len(near)} of these {len(exact)}" if far else f"all of these {len(exact)}"
    sentence = (
        f"{count} differ from the plain model by at most {max(line.error for line in near):.0e} of the\nlargest gradient, where "
        f"{TOLERANCE:.0e} is allowed"
    )
    if not far:
        return f"{sentence}: no cast to float32 leaves more."
    return (
        f"{sentence}. The others cast to float32 where float64 is asked for, and reach\n{TOLERANCE_OF_CASTS:.0e} only: "
        f"{', '.join(far)}."
    )


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:160].replace("|", "\\|")


def add_types(options: argparse.ArgumentParser) -> None:
    """Add which model types are tried, and by how many processes."""
    options.add_argument(
        "--types", nargs="+", metavar="TYPE", help="try these model types (default: all of AutoModelForCausalLM)"
    )
    options.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="start so many processes (default: %(default)s)"
    )


def main() -> int:
    options: argparse.ArgumentParser = parser(__doc__)
    add_types(options)
    options.add_argument("--page", type=Path, help="write docs/models.md there")
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
        "model types/packed": len(exact) - counts["alone"],
        "model types/refused without a reason": sum(line.kind == "refused" and not line.reason for line in lines),
        "model types/of the most used, refused": sum(
            line.kind == "refused" for line in lines if line.model_type in MOST_USED
        ),
        "model types/with a longest document": sum(bool(line.positions) for line in lines),
        **{
            f"registration/wrong {how} a layout": sum(
                line.registered[at] not in ("exact", "refused", "-") for line in lines
            )
            for at, how in enumerate(("with", "without"))
        },
        "error/largest among exact": max((line.error for line in exact if not line.casts), default=0.0),
        "error/largest among exact with casts": max((line.error for line in exact if line.casts), default=0.0),
        "CPU seconds/most of one": max(line.seconds for line in lines),
    }
    rows = [
        {
            "class": line.kind,
            "model type": line.model_type,
            "error": f"{line.error:.1e}",
            "seconds": f"{line.seconds:.1f}",
            "registered, layout": line.registered[0],
            "registered, none": line.registered[1],
            "longest document": line.positions,
            "reason": " ".join(line.reason.split())[:200],
        }
        for line in sorted(lines, key=lambda line: (CLASSES.index(line.kind), line.model_type))
    ]
    if arguments.page is not None:
        arguments.page.write_text(page(lines))
    return conclude(arguments, rows, figures, load, section="class")


if __name__ == "__main__":
    sys.exit(main())
