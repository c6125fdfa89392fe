"""Images, sound and video in rows: found, and refused. Only text is trained on, so they would be ignored without a word.

They are found by what they are (pictures as Python objects, the structs in which `datasets` stores them, features of a
data set), in a column or in a struct inside one, and by the names of columns that other stacks read them from. A row whose
column is empty has none. Nothing is sent between ranks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_longctx.data.list_columns import is_list

MEDIA = ("image", "audio", "video")
COLUMNS = {
    *MEDIA,
    *(f"{name}s" for name in MEDIA),
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "input_features"),
}
"""Names under which processors, TRL, LLaMA-Factory and transformers' multimodal models look for them."""
ENCODED = {"bytes", "path"}
"""Keys of the struct that the features Image, Audio and Video of `datasets` are stored as."""
DECODED = ({"array", "path", "sampling_rate"}, {"array", "sampling_rate"})
"""Keys of what Audio is decoded as."""
ENDINGS = (
    *(".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".avif", ".heic"),
    *(".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac"),
    *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg"),
)
"""How the paths of media end: of a struct with a path alone, any other file's may be text."""
FEATURES = ("Image", "Audio", "Video")
PACKAGES = ("PIL", "torchcodec", "torchvision")
"""Packages whose objects are pictures, sound or video."""

ONLY_TEXT = (
    "only text is trained on. Valid: rows without it (Dataset.remove_columns), if the text alone is to be learned"
)


def media_column(row: Mapping[str, Any]) -> str | None:
    """Return the first column of a row that holds an image, sound or video; None: there is none."""
    return next(
        (name for name, value in row.items() if not _is_empty(value) and (name in COLUMNS or _is_media(value))), None
    )


def media_part(content: Any) -> str:
    """Name the part of a message's content that is no text but media, for messages; "" if none is."""
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
        column = dataset.data.column(name)
        places = [(feature, column)] if name in COLUMNS else _places(feature, column)
        for inner, values in places:
            filled = _filled(values)
            if dataset._indices is not None:
                filled = filled[dataset._indices.column(0).to_numpy()]
            if filled.any():
                kind = type(inner).__name__
                shown = f", a column of {kind}" if kind in FEATURES else ""
                raise ValueError(f"row {int(np.argmax(filled))} has {name!r}{shown}, and {ONLY_TEXT}")


def _places(feature: Any, column: pa.ChunkedArray) -> Iterator[tuple[Any, pa.ChunkedArray]]:
    """Yield the columns with media, of a column or of the structs in it."""
    if isinstance(feature, dict) and pa.types.is_struct(column.type):
        for name, inner in feature.items():
            yield from _places(inner, pc.struct_field(column, name))
    elif _has_media(feature):
        yield feature, column


def _has_media(feature: Any) -> bool:
    if type(feature).__name__ in FEATURES:
        return True
    if isinstance(feature, dict):
        return any(map(_has_media, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_has_media, feature))
    return _has_media(inner) if (inner := getattr(feature, "feature", None)) is not None else False


def _filled(column: pa.ChunkedArray) -> np.ndarray:
    """bool [rows]: those that hold something, as `_is_empty` says of values."""
    kind = column.type
    if pa.types.is_struct(kind):
        children = [_filled(pc.struct_field(column, place)) for place in range(kind.num_fields)]
        return np.any(children, axis=0) if children else np.zeros(len(column), bool)
    if is_list(kind):
        filled = pc.greater(pc.list_value_length(column), 0)
    elif any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)):
        filled = pc.greater(pc.binary_length(column), 0)
    elif pa.types.is_boolean(kind):
        filled = column
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        filled = pc.not_equal(column, pa.scalar(0, kind))
    else:
        filled = pc.is_valid(column)
    return filled.fill_null(False).to_numpy()


def _is_media(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_stored(value) or any(map(_is_media, value.values()))
    if isinstance(value, list | tuple):
        return _is_media(next((item for item in value if item is not None), None))
    return type(value).__module__.split(".")[0] in PACKAGES


def _is_stored(value: Mapping[str, Any]) -> bool:
    """Return whether a mapping is what `datasets` stores or decodes media as, and not empty."""
    if value.keys() != ENCODED:
        return value.keys() in DECODED and value["array"] is not None
    if isinstance(value["bytes"], bytes):
        return True
    path = value["path"]
    return value["bytes"] is None and isinstance(path, str) and path.lower().endswith(ENDINGS)


def _is_empty(value: Any) -> bool:
    """Return whether a value is None or has no elements, or is a flag or a number that says so: False, 0."""
    try:
        return value is None or len(value) == 0
    except TypeError:  # a picture, a number, an array or tensor without dimensions
        return not value
