"""Exact, balanced fine-tuning of Hugging Face models on long and mixed-length documents.

    import hf_longctx
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="longctx")   # registration alone, or
    model = hf_longctx.from_pretrained(path)                                           # patched attention and loss, or
    model = hf_longctx.patch_model(model)                                              # an existing model
    trainer = hf_longctx.LongContextTrainer(model=model, args=args, train_dataset=..., plugin=hf_longctx.LongContextPlugin(...))

Importing registers the attention implementation "longctx" once transformers is imported; no other model changes.
"""

from hf_longctx.attention.exchange import Exchange
from hf_longctx.balance import balanced
from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.inference import prefill, score
from hf_longctx.layout import Layout, LayoutError, Segment, zigzag
from hf_longctx.models.attention import register as _register
from hf_longctx.models.llama import LongContextLlamaAttention
from hf_longctx.models.mixtral import LongContextMixtralAttention
from hf_longctx.models.patch import from_pretrained, patch_model
from hf_longctx.training.plugin import LongContextPlugin
from hf_longctx.training.trainer import LongContextMixin, LongContextTrainer

_register()

__all__ = [
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
    "balanced",
    "from_pretrained",
    "patch_model",
    "prefill",
    "score",
    "zigzag",
]
