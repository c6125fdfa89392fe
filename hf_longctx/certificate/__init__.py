"""Certificates of exactness: a tiny random copy of a model, computed once by the product's path and once by the plain model."""

from hf_longctx.certificate.float64 import float64_throughout
from hf_longctx.certificate.tiny_config import CannotShrink, Shrunk, shrink, tiny_configuration
from hf_longctx.certificate.tiny_model import tiny_model
from hf_longctx.certificate.tokens import ordinary_tokens

__all__ = [
    "CannotShrink",
    "Shrunk",
    "float64_throughout",
    "ordinary_tokens",
    "shrink",
    "tiny_configuration",
    "tiny_model",
]
