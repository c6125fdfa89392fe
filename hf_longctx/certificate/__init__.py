"""Certificates: a tiny random copy of a model, run through the product's own path and compared with the plain model, before the
model itself runs over a layout. So no class, no configuration, no code that comes with a model and no release of transformers
is computed wrongly without being noticed.

    certified_traits(model)     what the model needs over layouts; ValueError if it is not computed exactly
    certificate_of(model)       the same with what was found
    tiny_configuration(config), tiny_model(config)      the copy
"""

from hf_longctx.certificate.certificate import Certificate, certificate_for, certificate_of, certified_traits
from hf_longctx.certificate.float64 import float64_throughout
from hf_longctx.certificate.tiny_config import CannotShrink, Shrunk, shrink, tiny_configuration
from hf_longctx.certificate.tiny_model import tiny_model
from hf_longctx.certificate.tokens import ordinary_tokens

__all__ = [
    "CannotShrink",
    "Certificate",
    "Shrunk",
    "certificate_for",
    "certificate_of",
    "certified_traits",
    "float64_throughout",
    "ordinary_tokens",
    "shrink",
    "tiny_configuration",
    "tiny_model",
]
