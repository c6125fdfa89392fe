"""Exact, balanced fine-tuning of Hugging Face models on long and mixed-length documents.

    import hf_longctx
    model = hf_longctx.from_pretrained(path)      # attention and loss patched, or
    model = hf_longctx.patch_model(model)         # an existing model, patched; the trainer does it by itself
    trainer = hf_longctx.LongContextTrainer(model=model, args=args, train_dataset=..., plugin=hf_longctx.LongContextPlugin(...))

Importing registers the attention implementation "longctx" once transformers' models are imported; no other model changes.
Names are imported when they are first used, so that planning and the command line load no torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from hf_longctx.registration import register_with_transformers

if TYPE_CHECKING:
    __version__: str
    from hf_longctx.attention.exchange import Exchange
    from hf_longctx.certified_patch import from_pretrained, patch_model
    from hf_longctx.data.collator import LengthAwareCollator
    from hf_longctx.inference.score import prefill, score
    from hf_longctx.layouts.layout import Layout, LayoutError, Segment, zigzag
    from hf_longctx.models.families.llama import LongContextLlamaAttention
    from hf_longctx.models.families.mixtral import LongContextMixtralAttention
    from hf_longctx.planner import CostModel, Topology
    from hf_longctx.settings.longctx import LongContextPlugin
    from hf_longctx.training.trainer import LongContextMixin, LongContextTrainer
else:
    _MODULES = {
        "CostModel": "planner",
        "Exchange": "attention.exchange",
        "Layout": "layout",
        "LayoutError": "layout",
        "LengthAwareCollator": "data.collator",
        "LongContextLlamaAttention": "models.llama",
        "LongContextMixin": "training.trainer",
        "LongContextMixtralAttention": "models.mixtral",
        "LongContextPlugin": "settings.longctx",
        "LongContextTrainer": "training.trainer",
        "Segment": "layout",
        "Topology": "planner",
        "from_pretrained": "patch",
        "patch_model": "patch",
        "prefill": "inference",
        "score": "inference",
        "zigzag": "layout",
    }

    def __getattr__(name):
        """A name of __all__, imported from where it lives (PEP 562); or the version, which pyproject.toml says."""
        if name == "__version__":
            return version("hf_longctx")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


register_with_transformers()

__all__ = [
    "CostModel",
    "Exchange",
    "Layout",
    "LayoutError",
    "LengthAwareCollator",
    "LongContextLlamaAttention",
    "LongContextMixin",
    "LongContextMixtralAttention",
    "LongContextPlugin",
    "LongContextTrainer",
    "Segment",
    "Topology",
    "from_pretrained",
    "patch_model",
    "prefill",
    "score",
    "zigzag",
]
