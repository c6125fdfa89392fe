"""The lengths and labels of a global batch: what can be planned, and in which order. Nothing is sent."""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.topology import PlanError, Topology


def validated_labels(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 [documents]. Raises PlanError unless each is 0 to the document's tokens."""
    labels = np.asarray(labels)
    if labels.shape != lengths.shape or not np.issubdtype(labels.dtype, np.integer):
        raise PlanError(
            f"labels has dtype {labels.dtype} and shape {labels.shape}; it must be integers, one for each of the "
            f"{len(lengths)} documents"
        )
    labels = labels.astype(np.int64)
    impossible = np.flatnonzero((labels < 0) | (labels > lengths))
    if len(impossible):
        i = int(impossible[0])
        raise PlanError(f"document {i} has {labels[i]} labels and {lengths[i]} tokens; valid: 0 to {lengths[i]} labels")
    return labels


def validated(lengths: np.ndarray, topology: Topology) -> np.ndarray:
    """int64 [documents]. Raises PlanError unless every document can be planned."""
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or len(lengths) == 0 or not np.issubdtype(lengths.dtype, np.integer):
        raise PlanError(
            f"lengths has dtype {lengths.dtype} and shape {lengths.shape}; "
            "it must be integers, one per document, at least one"
        )
    lengths = lengths.astype(np.int64)
    shortest, longest = int(lengths.argmin()), int(lengths.argmax())
    if lengths[shortest] < 1:
        raise PlanError(f"document {shortest} has {lengths[shortest]} tokens; every document needs >= 1")
    topology.refuse_too_long(int(lengths[longest]), f"document {longest}")
    return lengths


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """int64 [documents]: their indices by falling length, equal lengths in order."""
    bits = len(lengths).bit_length()
    longest = int(lengths.max())
    if longest.bit_length() + bits >= 63:
        return np.argsort(-lengths, kind="stable")
    # Sorting one 64-bit key per document is 6 times as fast as argsort.
    keys = ((longest - lengths) << bits) | np.arange(len(lengths))
    keys.sort()
    return keys & ((1 << bits) - 1)
