"""Images, sound and video in rows: found, and refused. Only text is trained on, so they would be ignored without a word.

They are found by what they are (pictures as Python objects, the structs in which `datasets` stores them, features of a
data set) and by the names of columns that other stacks read them from. A row whose column is empty has none. Nothing is
sent between ranks.
"""

from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MEDIA = ("image", "audio", "video")
COLUMNS = {
    *MEDIA,
    *(f"{name}s" for name in MEDIA),
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "input_features"),
}
"""Names under which processors, TRL, LLaMA-Factory and transformers' multimodal models look for them."""
STORED = ({"bytes", "path"}, {"array", "path", "sampling_rate"}, {"array", "sampling_rate"})
"""Keys of the structs that the features Image, Audio and Video of `datasets` are stored or decoded as."""
FEATURES = ("Image", "Audio", "Video")
PACKAGES = ("PIL", "torchcodec", "torchvision")
"""Whose objects are pictures, sound or video."""

VALID = "only text is trained on. Valid: rows without it (Dataset.remove_columns), if the text alone is to be learned"


def media_column(row: Mapping[str, Any]) -> str | None:
    """The first column of a row that holds an image, sound or video; None: there is none."""
    return next(
        (name for name, value in row.items() if not _is_empty(value) and (name in COLUMNS or _is_media(value))), None
    )


def media_part(content: Any) -> str:
    """What part of a message's content is no text but media, for messages; "" if none is."""
    for number, part in enumerate(content if isinstance(content, list | tuple) else ()):
        if isinstance(part, Mapping):
            kind = part.get("type")
            names = [kind] if isinstance(kind, str) else [name for name, value in part.items() if value is not None]
            if any(word in str(name) for name in names for word in MEDIA):
                return f"part {number} of type {names[0]!r}"
        if _is_media(part):
            return f"part {number}, a {type(part).__name__}"
    return ""


def refuse_media(dataset: datasets.Dataset) -> None:
    """Raises ValueError if a column of a stored data set holds images, sound or video in a row that is in it."""
    for name, feature in dataset.features.items():
        if name not in COLUMNS and not _has_media(feature):
            continue
        column = dataset.data.column(name)
        filled = pc.is_valid(column)
        for is_list in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list):
            if is_list(column.type):
                filled = pc.greater(pc.list_value_length(column).fill_null(0), 0)
        if pa.types.is_string(column.type):
            filled = pc.greater(pc.utf8_length(column).fill_null(0), 0)
        rows = filled.to_numpy()
        if dataset._indices is not None:
            rows = rows[dataset._indices.column(0).to_numpy()]
        if rows.any():
            kind = f", a column of {type(feature).__name__}" if type(feature).__name__ in FEATURES else ""
            raise ValueError(f"row {int(np.argmax(rows))} has {name!r}{kind}, and {VALID}")


def _has_media(feature: Any) -> bool:
    if type(feature).__name__ in FEATURES:
        return True
    if isinstance(feature, dict):
        return any(map(_has_media, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_has_media, feature))
    return _has_media(inner) if (inner := getattr(feature, "feature", None)) is not None else False


def _is_media(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.keys() in STORED and any(each is not None for each in value.values())
    if isinstance(value, list | tuple):
        return bool(value) and _is_media(value[0])
    return type(value).__module__.split(".")[0] in PACKAGES


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and len(value) == 0)
