"""The certificate of a model: its tiny copy is probed, patched, run on virtual ranks and compared.

Three ways are tried, until one is exact:

    masks    they carry the layout to attention layers; modules that they do not reach run document by document
    own      attention layers keep their masks, and run document by document too
    alone    one whole document in a micro-batch, with the plain model

It covers the copy: classes, configuration and code, not the weights, and no kernel that the copy does not use.
"""

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Literal

import torch
from transformers.utils import logging

from hf_longctx.certificate import kept_certificates as cache
from hf_longctx.certificate.drawn_documents import Documents, documents_for, steps_for
from hf_longctx.certificate.exactness import (
    TOLERANCE,
    TOLERANCE_OF_CASTS,
    Answer,
    leaks,
    plain_answer,
    sees_later_tokens,
    worst_difference,
)
from hf_longctx.certificate.float64 import Float64, float64_throughout
from hf_longctx.certificate.position_tables import longest_document
from hf_longctx.certificate.probing import classes_by_document, first_position
from hf_longctx.certificate.sharing import made_on_rank_0
from hf_longctx.certificate.tiny_config import tiny_configuration
from hf_longctx.certificate.tiny_model import own_configuration, tiny_model
from hf_longctx.models.general import refuse_unreachable
from hf_longctx.models.patch import attention_layers, install
from hf_longctx.models.traits import ALONE, Traits

logger = logging.get_logger(__name__)


Way = Literal["masks", "own", "alone"]
"""See the head of this module."""
DOCUMENTS = {
    "split": "documents over any ranks",
    "whole": "documents whole on a rank",
    "alone": "one whole document in a micro-batch",
}
"""How documents may lie, in words."""
WAYS: dict[Way, str] = {
    "own": "nor with attention of its own, document by document",
    "alone": "nor with one whole document in a micro-batch",
}
NOT_CAUSAL = (
    "its logits depend on later tokens of the document: it is not causal, and the loss of the next token would teach it to copy "
    "(an encoder needs a switch in its configuration, such as is_decoder)"
)


@dataclass(frozen=True)
class Certificate:
    """The result of comparing a model's tiny copy with the plain model."""

    model_class: str
    exact: bool
    traits: Traits
    reason: str = ""
    """Why it is not exact, or could not be tested; of one whose masks cannot carry layouts, why not."""
    tested: bool = True
    error: float = float("nan")
    """The largest difference from the plain model: see exactness.py."""
    where: str = ""
    """The tensor with that difference, and the ranks that it was computed on."""
    casts: tuple[str, ...] = ()
    """Operations that give float32 or less out of float64, where rounding of theirs leaves more than TOLERANCE."""
    seconds: float = field(default=0.0, compare=False)
    given: dict[str, Any] = field(default_factory=dict)
    """The tiny configuration, where a user gave one in place of the rule's."""

    @property
    def refusal(self) -> str:
        """Return what is said of a model that is not exact."""
        if self.tested:
            return (
                f"{self.model_class} is not computed exactly over layouts: {self.reason}. Its certificate compared a tiny "
                "copy with the plain model, document by document. Valid: a model whose certificate is good"
            )
        return (
            f"{self.model_class} could not be tested: nobody knows whether it is exact over layouts. {self.reason}. Valid: a "
            "tiny configuration of yours (hf-longctx certify MODEL --config tiny.json), or to train it untested, a document at a "
            "time: model.uncertified: true, or patch_model(model, uncertified=True)"
        )

    def __str__(self) -> str:
        """A line for reports of a model that was accepted."""
        documents = DOCUMENTS[self.traits.documents]
        if self.traits.positions is not None:
            documents += f", of at most {self.traits.positions}"
        if not self.exact:
            return (
                f"{self.model_class} is uncertified: no tiny copy could be tested, and nobody knows whether it is exact over "
                f"layouts, or causal; {documents}, with the plain model"
            )
        copy = "tiny copy of a given configuration" if self.given else "tiny copy"
        casts = f" but for casts in {', '.join(self.casts)}" if self.casts else ""
        return (
            f"exact over layouts: largest difference {self.error:.1g} of the largest gradient, float64{casts}, {copy}; "
            f"{documents}; torch {version('torch')}, transformers {version('transformers')}; not covered: weights"
        )


_CERTIFICATES: dict[str, Certificate] = {}


def accepted_certificate(model: Any, uncertified: bool = False) -> Certificate:
    """Return the certificate of a causal language model that may run over layouts, with what it needs there.

    Args:
        uncertified: take a model that could not be tested, with a warning, to run alone: one whole document in a micro-batch.

    Raises:
        ValueError: its tiny copy differs from the plain model, or could not be tested; says what and where.
    """
    certificate = certificate_of(model)
    if certificate.exact:
        if certificate.traits.alone:
            logger.warning(
                f"{certificate.model_class}: no layout reaches its attention ({certificate.reason}). It is exact with one whole "
                "document in a micro-batch, which the plain model runs on one rank; its loss is the cross-entropy of its logits"
            )
        elif not certificate.traits.in_masks:
            logger.warning(
                f"{certificate.model_class}: masks cannot carry a layout to its attention ({certificate.reason}). It is exact "
                "with attention code of its own, document by document, with masks of tokens by tokens; documents stay whole on a "
                "rank"
            )
        return certificate
    if uncertified and not certificate.tested:
        certificate = replace(certificate, traits=ALONE)
        logger.warning(f"{certificate}. {certificate.reason}")
        return certificate
    raise ValueError(certificate.refusal)


def certificate_of(model: Any) -> Certificate:
    """Return the certificate of a causal language model."""
    return certificate_for(type(model), model.config)


def certificate_for(cls: type, config: Any) -> Certificate:
    """Return the certificate of a class of causal language models with a configuration: that of this process, else that on disk,
    else a new one, which is kept on disk if the model is exact. Others are made again: what was missing may be there then."""
    key = cache.key_of(cls, config)
    if key not in _CERTIFICATES:
        _CERTIFICATES[key] = cache.read(key, Certificate) or new_certificate(cls, config)
    return _CERTIFICATES[key]


def share_certificate(model: Any) -> None:
    """Give this rank rank 0's certificate of a model, which makes it for all of them. Each rank of the default process group
    calls this.

    Raises:
        ValueError: this rank has another model, other code or other versions than rank 0.
        RuntimeError, TimeoutError: rank 0 has none; see sharing.py.
    """
    facts, key = cache.facts_of(type(model), model.config), cache.key_of(type(model), model.config)
    _CERTIFICATES[key] = made_on_rank_0(facts, lambda: certificate_of(model), Certificate)


def new_certificate(cls: type, config: Any, tiny: Any = None) -> Certificate:
    """Make the certificate of a class with a configuration, whatever is known of it, and keep it on disk if the model is exact.

    Args:
        tiny: a configuration of the same class to test in place of the rule's.
    """
    begin = time.perf_counter()
    with quiet_and_alone():
        certificate = _test(cls, config, tiny)
    certificate = replace(certificate, seconds=time.perf_counter() - begin, given=tiny.to_dict() if tiny else {})
    if certificate.exact:
        cache.write(cache.key_of(cls, config), certificate)
    return certificate


@contextlib.contextmanager
def quiet_and_alone() -> Iterator[None]:
    """Run a tiny model in the context without warnings, and on one thread: its tensors are so small that more would wait for each
    other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def _test(cls: type, config: Any, tiny: Any = None) -> Certificate:
    name = cls.__name__
    try:
        tiny = tiny or tiny_configuration(config, cls=cls)
    except Exception as error:
        return Certificate(name, exact=False, tested=False, traits=Traits(), reason=_said(error))
    with float64_throughout() as mode:
        try:
            plain = tiny_model(tiny, cls=cls)
            documents = documents_for(plain.config)
            right = plain_answer(plain, documents)
            bidirectional = sees_later_tokens(plain, documents)
            families = bool(attention_layers(plain))
        except Exception as error:
            failure = _said(error)
        else:
            if bidirectional:
                return Certificate(name, exact=False, traits=Traits(), reason=NOT_CAUSAL)
            first = _compare(cls, tiny, documents, right, "masks", mode)
            if first.exact:
                return _with_positions(first, cls, config, tiny)
            # Attention layers of ours take a layout whatever the traits say.
            other_ways: tuple[Way, ...] = () if families else ("own", "alone")
            reasons = [first.reason]
            for way in other_ways:
                other = _compare(cls, tiny, documents, right, way, mode)
                if other.exact:
                    return _with_positions(replace(other, reason=first.reason), cls, config, tiny)
                reasons.append(f"{WAYS[way]}: {other.reason}")
            return replace(first, reason="; ".join(reasons))
    return Certificate(name, exact=False, tested=False, traits=Traits(), reason=_without_answer(cls, tiny, failure))


def _without_answer(cls: type, tiny: Any, failure: str) -> str:
    """Say why the plain copy gives no answer in float64: whether it does in float32."""
    try:
        plain = tiny_model(tiny, torch.float32, cls=cls)
        plain_answer(plain, documents_for(plain.config))
    except Exception as error:
        return f"the plain model does not run: {_said(error)}"
    return (
        f"the plain model runs in float32 and refuses float64, in which certificates compare: {failure}. Where a switch of its "
        "configuration asks for float32, set it to False"
    )


def _compare(cls: type, tiny: Any, documents: Documents, right: Answer, way: Way, mode: Float64) -> Certificate:
    """Probe, patch, run and compare a tiny model. `mode` has noted the casts of the plain model already."""
    name = cls.__name__
    try:
        traits = _traits(cls, tiny, documents, way)
        model = _patched(cls, tiny, traits)
        worst, where = worst_difference(model, documents, steps_for(traits), right)
        leaking = "" if traits.alone else leaks(model, documents)  # alone, it is as causal as the plain model
    except Exception as error:
        return Certificate(name, exact=False, traits=Traits(), reason=_said(error))
    reason = ""
    if leaking:
        reason = f"logits depend on {leaking}"
    elif worst > (TOLERANCE_OF_CASTS if mode.narrowed else TOLERANCE):
        reason = f"{where} differs by {worst:.1e} of the largest"
    casts = tuple(sorted(mode.narrowed)) if worst > TOLERANCE else ()
    return Certificate(name, exact=not reason, traits=traits, reason=reason, error=worst, where=where, casts=casts)


def _with_positions(certificate: Certificate, cls: type, config: Any, tiny: Any) -> Certificate:
    """Add to the traits of an exact model how long its documents may be."""
    traits = certificate.traits
    longest = longest_document(own_configuration(cls, config), tiny, traits, lambda other: _patched(cls, other, traits))
    return replace(certificate, traits=replace(traits, positions=longest))


def _traits(cls: type, tiny: Any, documents: Documents, way: Way) -> Traits:
    """Ask a tiny model where its positions begin, and which of its modules must run document by document; nothing of one that
    runs as it is."""
    if way == "alone":
        return ALONE
    plain = tiny_model(tiny, cls=cls).eval()
    refuse_unreachable(plain)
    positions = replace(first_position(plain, documents), in_masks=way == "masks")
    states: tuple[str, ...] = ()
    while True:  # a module that holds one with a state may have another of its own
        asked = replace(positions, document_wise=states, all_attend=False)
        more = classes_by_document(_patched(cls, tiny, asked).eval(), documents)
        if set(more) <= set(states):
            return replace(positions, document_wise=states)
        states = tuple(sorted({*states, *more}))


def _patched(cls: type, tiny: Any, traits: Traits) -> Any:
    return patched_copy(tiny_model(tiny, cls=cls), traits)


def patched_copy(model: Any, traits: Traits, kernel: str = "auto", liger_kernels: bool = True) -> Any:
    """Make a tiny model able to run over layouts, as `hf_longctx.patch_model` makes the model that it is a copy of."""
    return install(model, None if attention_layers(model) else traits, kernel=kernel, liger_kernels=liger_kernels)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:900]}"
