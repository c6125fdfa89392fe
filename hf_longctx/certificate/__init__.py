"""Certificates: a tiny random copy of a model, run through the product's own path and compared with the plain model, before the
model itself runs over a layout. So no class, no configuration, no code that comes with a model and no release of transformers
is computed wrongly without being noticed.

    accepted_certificate(model)     what the model needs over layouts, and what was found; ValueError unless exact
    certificate_of(model)           the same of any model; from this process or from disk (data/cache.py), else new
    share_certificate(model)        on every rank: rank 0 makes it (sharing.py)
    run_check(...)                  the copy once more, on the device, in the precision and with the kernels of a run (as_run.py)
    tiny_configuration(config), tiny_model(config)      the copy

tensor_parallel.py tries the copy with transformers' tensor parallelism, where a model was loaded so.
"""

from hf_longctx.certificate.as_run import Conditions, RunCheck, run_check
from hf_longctx.certificate.certificate import (
    Certificate,
    accepted_certificate,
    certificate_for,
    certificate_of,
    new_certificate,
    share_certificate,
)
from hf_longctx.certificate.float64 import float64_throughout
from hf_longctx.certificate.tiny_config import CannotShrink, Shrunk, shrink, tiny_configuration
from hf_longctx.certificate.tiny_model import tiny_model
from hf_longctx.certificate.tokens import ordinary_tokens

__all__ = [
    "CannotShrink",
    "Certificate",
    "Conditions",
    "RunCheck",
    "Shrunk",
    "accepted_certificate",
    "certificate_for",
    "certificate_of",
    "float64_throughout",
    "new_certificate",
    "ordinary_tokens",
    "run_check",
    "share_certificate",
    "shrink",
    "tiny_configuration",
    "tiny_model",
]
