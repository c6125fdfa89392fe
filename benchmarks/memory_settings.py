"""What saves memory, on every decoder of transformers: tiles of MLPs, chunks of the loss, kept attention, offload.

    python benchmarks/memory_settings.py --json benchmarks/results/memory_settings.json --check      # 4 minutes
    python benchmarks/memory_settings.py --types diffllama mamba                                      # a few

The tiny copy of each model type that a layout reaches (model_coverage.py says which) runs over packed documents on one rank, in
float64, with each of SETTINGS; its loss and every gradient are compared with those of the plain model on each document alone. A
setting that a class is refused, since no MLP of it is known to compute each token by itself, is counted apart.
"""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from model_coverage import add_types
from report import conclude, parser


@dataclass(frozen=True)
class Setting:
    """How a model is trained with less memory."""

    checkpointing: bool = False
    keep_attention: str = "never"
    offload: float = 0.0
    """Share of what middle layers keep that waits in host memory."""
    patched: dict[str, int] = field(default_factory=dict)
    """Arguments of `patch_model`."""


TILES, CHUNKS = {"mlp_tile_tokens": 5}, {"loss_chunk_tokens": 7}
"""Of 56 tokens."""
SETTINGS = {
    "tiles": Setting(patched=TILES),
    "chunks of the loss": Setting(patched=CHUNKS),
    "attention kept": Setting(True, "always"),
    "attention kept if worth it": Setting(True, "auto"),
    "offload": Setting(offload=0.7),
    "offload of what is recomputed": Setting(True, offload=0.7),
    "attention kept, offload": Setting(True, "always", 0.7),
    "all together": Setting(True, "always", 1.0, TILES | CHUNKS),
}
CLOSE = 1e-6
"""Largest difference, as a part of the largest gradient and of the loss: of families that cast to float32 too."""


@dataclass
class Line:
    """A model type, and what each setting makes of it."""

    model_type: str
    differences: dict[str, float] = field(default_factory=dict)
    """Setting -> largest difference; those that do not apply are left out."""
    refused: tuple[str, ...] = ()
    """Settings that are refused."""
    left_out: str = ""
    """Why nothing is compared."""


def compared(model_type: str) -> Line:
    """Compare a model type's tiny copy with the plain model, with each setting."""
    import torch
    from tiny_copies import configuration
    from transformers.utils import logging

    from hf_longctx.certificate import new_certificate
    from hf_longctx.certificate.certificate import quiet_and_alone
    from hf_longctx.certificate.drawn_documents import documents_for
    from hf_longctx.certificate.exactness import difference, plain_answer
    from hf_longctx.certificate.float64 import float64_throughout
    from hf_longctx.certificate.tiny_config import tiny_configuration
    from hf_longctx.certificate.tiny_model import causal_lm_class, own_configuration, tiny_model

    logging.set_verbosity_error()
    line = Line(model_type)
    try:
        config = configuration(model_type)
        cls = causal_lm_class(config)
        config = own_configuration(cls, config)
        certificate = new_certificate(cls, config)
    except Exception as error:
        return Line(model_type, left_out=f"no default configuration: {type(error).__name__}: {error}")
    if not certificate.exact or certificate.traits.alone:
        return Line(model_type, left_out=certificate.reason or "one document in a micro-batch")
    tiny = tiny_configuration(config, cls=cls)
    with quiet_and_alone(), float64_throughout(), torch.random.fork_rng():
        plain = tiny_model(tiny, cls=cls)
        documents = documents_for(plain.config)
        right = plain_answer(plain, documents)
        for name, setting in SETTINGS.items():
            try:
                answer = _answer(tiny_model(tiny, cls=cls), certificate.traits, documents, setting)
            except ValueError as error:
                if "nothing can run in tiles" not in str(error):
                    raise
                line.refused += (name,)
                continue
            if answer is not None:
                line.differences[name] = difference(answer, right)[0]
    return line


def _answer(model: Any, traits: Any, documents: Any, setting: Setting) -> Any:
    """Loss and gradients of all documents in one row; None where the class has no layers to which the setting could apply."""
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    from hf_longctx.certificate.drawn_documents import TOKENS, labels_of, packed_layout, tokens_of
    from hf_longctx.certificate.exactness import Answer, _backward, gradients_of
    from hf_longctx.models.patch import attention_layers, install
    from hf_longctx.training.memory.activations import ActivationMemory

    install(model, None if attention_layers(model) else traits, **setting.patched)
    if setting.checkpointing:
        try:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError:
            return None
    memory = ActivationMemory(model, keep_attention=setting.keep_attention, device="cpu")
    if setting.offload:
        if not memory._layers:
            return None
        # The first and the last layer keep all they have, and a copy may have no others: layers that never run take their places.
        memory._layers = [GradientCheckpointingLayer(), *memory._layers, GradientCheckpointingLayer()]
    layout = packed_layout()
    shard = layout.shard(0)
    labels = torch.cat([labels_of(documents, segment) for segment in shard])
    holding = memory.micro_batch(layout, 0, setting.offload)
    with holding if setting.checkpointing or setting.offload else contextlib.nullcontext():
        loss = model(
            input_ids=tokens_of(documents, shard)[None],
            layout=layout,
            shift_labels=labels[None],
            num_items_in_batch=1,
            num_tokens_in_batch=TOKENS,
        ).loss
        _backward(loss)
    if setting.offload and not memory.host.bytes_to_host:
        raise AssertionError(f"nothing of {type(model).__name__} was moved, with {setting}")
    return Answer(float(loss.detach()), gradients_of(model))


def figures_of(lines: Sequence[Line]) -> Iterator[tuple[str, float]]:
    """Yield what is checked."""
    for name in SETTINGS:
        differences = [line.differences[name] for line in lines if name in line.differences]
        yield f"{name}/families", len(differences)
        yield f"{name}/families that differ", sum(not difference <= CLOSE for difference in differences)
        yield f"{name}/families that are refused", sum(name in line.refused for line in lines)
        yield f"{name}/largest difference", max(differences, default=math.nan)
    yield "model types/all", len(lines)
    yield "model types/left out without a reason", sum(not line.differences and not line.left_out for line in lines)


def main() -> int:
    options: argparse.ArgumentParser = parser(__doc__)
    add_types(options)
    arguments = options.parse_args()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    load = os.getloadavg()[0]
    lines = []
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for line in pool.map(compared, arguments.types or list(NAMES)):
            lines.append(line)
            worst = max(line.differences.values(), default=math.nan)
            print(f"{line.model_type}: {worst:.1e} {line.left_out[:120]}", file=sys.stderr)
    figures = dict(figures_of(lines))
    rows = [
        {
            "setting": name,
            "families": f"{figures[f'{name}/families']:.0f}",
            "differ": f"{figures[f'{name}/families that differ']:.0f}",
            "refused": f"{figures[f'{name}/families that are refused']:.0f}",
            "largest difference": f"{figures[f'{name}/largest difference']:.1e}",
        }
        for name in SETTINGS
    ]
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
