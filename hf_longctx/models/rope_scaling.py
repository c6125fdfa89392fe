"""RoPE scaling: rotary positions of a pretrained model stretched to longer documents, through transformers' own
`rope_parameters`.

The configuration is changed before the model is made, because the rotary embedding computes its frequencies then; it is
saved with the model, so that the checkpoint needs nothing of ours. Only scalings that depend on the configuration alone
are exact over a layout:

    linear   every frequency / factor                              (Chen et al., arXiv 2306.15595)
    yarn     low frequencies / factor, high ones kept, attention sharpened    (Peng et al., arXiv 2309.00071)
    llama3   low frequencies / factor, high ones kept              (Llama 3.1)

Nothing is sent between ranks, and neither torch nor transformers is imported.
"""

from typing import Any

SCALINGS: dict[str, dict[str, float | None]] = {
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": None, "beta_slow": None, "attention_factor": None},
}
"""RoPE type -> its parameters beside `factor`, with their defaults (None: transformers')."""

UNSAFE_ROPE_TYPES = frozenset({"dynamic", "longrope"})
"""RoPE scalings that depend on the largest position of the *call*: ranks that hold different parts of a document
would disagree."""


def check_scaling(rope_type: str, factor: float, parameters: dict[str, float | None]) -> None:
    """Raises ValueError for a scaling that is not one, says which, and what would be valid. `parameters`: those that
    were given, beside `factor`; None counts as not given."""
    if rope_type in UNSAFE_ROPE_TYPES:
        raise ValueError(
            f"rope_type={rope_type!r} scales by the largest position of the call, which differs between the ranks that "
            f"hold a document; valid: {', '.join(SCALINGS)}"
        )
    if rope_type not in SCALINGS:
        raise ValueError(f"rope_type={rope_type!r} is unknown; valid: {', '.join(SCALINGS)}")
    given = {name: value for name, value in parameters.items() if value is not None}
    if not factor > 1:
        raise ValueError(f"factor={factor} must be more than 1: the context after scaling / before")
    if foreign := sorted(given.keys() - SCALINGS[rope_type].keys()):
        valid = ", ".join(["factor", "original_max_position_embeddings", *SCALINGS[rope_type]])
        raise ValueError(f"{', '.join(foreign)} means nothing to rope_type={rope_type!r}; it has {valid}")
    for name, value in given.items():
        if value <= 0:
            raise ValueError(f"{name}={value} must be positive")
    # transformers' defaults for yarn are 1 and 32.
    for low, high, default in (("low_freq_factor", "high_freq_factor", (1, 4)), ("beta_slow", "beta_fast", (1, 32))):
        first, second = given.get(low, default[0]), given.get(high, default[1])
        if first >= second:
            raise ValueError(f"{low}={first} must be less than {high}={second}: between them frequencies are blended")


def scale_rope(
    config: Any,
    *,
    rope_type: str,
    factor: float,
    original_max_position_embeddings: int | None = None,
    **parameters: float | None,
) -> None:
    """Stretches the rotary positions that a model will have, in place: call it before the model is made from `config`.

    A scaling that the configuration has already is replaced. `max_position_embeddings` grows to factor * original, and
    never shrinks.

    Args:
        config: transformers' configuration of the model.
        rope_type: linear, yarn or llama3.
        factor: context after scaling / context of pretraining.
        original_max_position_embeddings: context of pretraining, in tokens; by default what the configuration says.
        parameters: yarn: beta_fast, beta_slow, attention_factor. llama3: low_freq_factor, high_freq_factor.

    Raises:
        ValueError: the model has no rotary positions, or several kinds of them; or the scaling is not one.
    """
    check_scaling(rope_type, factor, parameters)
    before = getattr(config, "rope_parameters", None)
    if not before:
        raise ValueError(
            f"a {config.model_type} model has no rotary positions to scale (ALiBi models take any length as they are): "
            "remove rope_scaling"
        )
    if any(isinstance(value, dict) for value in before.values()):
        raise ValueError(
            f"this {config.model_type} model has several kinds of rotary positions ({', '.join(before)}), and one scaling "
            "was given: set config.rope_parameters yourself"
        )
    if before.get("rope_type") == "linear" and original_max_position_embeddings is None:
        raise ValueError(
            f"this model's positions are scaled already (linear, factor {before['factor']}), and its configuration does not say "
            "from which context: give original_max_position_embeddings; factor then counts from there"
        )
    original = (
        original_max_position_embeddings
        or before.get("original_max_position_embeddings")
        or config.max_position_embeddings
    )
    kept = {name: before[name] for name in ("rope_theta", "partial_rotary_factor") if name in before}
    chosen = SCALINGS[rope_type] | {name: value for name, value in parameters.items() if value is not None}
    if (
        getattr(config, "head_dim", 0) is None
    ):  # as in Mixtral's published configuration; transformers' yarn multiplies it
        config.head_dim = config.hidden_size // config.num_attention_heads
    config.rope_parameters = {
        **kept,
        "rope_type": rope_type,
        "factor": float(factor),
        **({} if rope_type == "linear" else {"original_max_position_embeddings": original}),
        **{name: float(value) for name, value in chosen.items() if value is not None},
    }
    config.max_position_embeddings = max(config.max_position_embeddings, round(original * factor))
