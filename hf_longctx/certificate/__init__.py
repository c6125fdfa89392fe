"""Certificates: a tiny random copy of a model, run through the product's own path and compared with the plain model, before the
model itself runs over a layout. So no class, no configuration, no code that comes with a model and no release of transformers
is computed wrongly without being noticed.

    certified_traits(model)     what the model needs over layouts; ValueError if it is not computed exactly
    certificate_of(model)       the same with what was found
"""

from hf_longctx.certificate.certificate import Certificate, certificate_for, certificate_of, certified_traits

__all__ = ["Certificate", "certificate_for", "certificate_of", "certified_traits"]
