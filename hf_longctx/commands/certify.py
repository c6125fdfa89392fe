"""`hf-longctx certify`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def certify(
    model: Annotated[str, typer.Argument(help="A directory, a model of the hub, or a model type of transformers.")],
    config: Annotated[
        Path | None, typer.Option(help="Test the small sizes in this JSON file, where none are found by rule.")
    ] = None,
) -> None:
    """Check that a model is computed exactly over layouts: compare a tiny random copy with the plain model.

    Says whether documents may be split over ranks, packed, or run one at a time, and how far the copies differ. No weights are
    read. A model that differs, or cannot be tested, is an error. The certificate is kept in the cache, where training finds it.

    Example: hf-longctx certify qwen3
    """
    from hf_longctx.certificate import new_certificate
    from hf_longctx.certificate.certificate import DOCUMENTS
    from hf_longctx.certificate.given_config import given_configuration
    from hf_longctx.certificate.tiny_model import causal_lm_class, own_configuration

    whole = _configuration(model)
    cls = causal_lm_class(whole)
    own = own_configuration(cls, whole)
    certificate = new_certificate(cls, own, None if config is None else given_configuration(config, own))
    if not certificate.exact:
        raise ValueError(certificate.refusal)
    traits = certificate.traits
    print(f"{certificate.model_class}: exact over layouts")
    print(f"  {DOCUMENTS[traits.documents]}")
    if traits.document_wise:
        names = ", ".join(name.rsplit(".", 1)[-1] for name in traits.document_wise)
        print(f"  document by document: {names}")
    if traits.positions is not None:
        print(f"  documents of at most {traits.positions}, where positions end")
    if certificate.reason:
        print(f"  {'no layout reaches it' if traits.alone else 'attention of its own'}: {certificate.reason}")
    print(f"  largest difference: {certificate.error:.1e} of the largest gradient ({certificate.where}), float64")
    print(f"  tested in {certificate.seconds:.1f} s: classes, configuration and code; not the weights")


def _configuration(model: str) -> Any:
    """A configuration of transformers for a directory, a published model or a model type."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from hf_longctx.commands.shared.costs import refuse_unreachable
    from hf_longctx.commands.shared.models import published_sizes, transformers_config
    from hf_longctx.settings.fields import did_you_mean, is_misspelt

    if (sizes := published_sizes(model)) is not None:
        return transformers_config(sizes)
    if model in CONFIG_MAPPING:
        return CONFIG_MAPPING[model]()
    refusal = f"{model!r} is no directory, no model of the hub that can be read and no model type of transformers"
    near = did_you_mean(model, CONFIG_MAPPING)
    if near and not Path(model).exists() and is_misspelt(model, CONFIG_MAPPING):
        raise ValueError(f"{refusal}{near}")
    refuse_unreachable(model)
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{refusal}{near}: {str(error).splitlines()[0]}") from error
