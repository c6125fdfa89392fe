"""Records of an acceptance run -> one page: verdicts, pictures, published figures beside ours, tables of all parts.

The page needs nothing but a browser: its style is that of the package's own pages, and there are no scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from acceptance.anchors import ANCHORS
from acceptance.catalogue import Part
from acceptance.findings import CONFIRMED, NOT_MEASURED, REFUTED, Verdict, verdicts
from acceptance.flow import Folder
from acceptance.record import DONE, FAILED, NOT_POSSIBLE, OUT_OF_TIME, RUNNING, Record, Shown

STYLE = Path(__file__).parents[2] / "hf_longctx" / "report" / "page" / "page.css"
TEMPLATE = "page.html.j2"
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Picture:
    """Bars, one for each figure of a part that matches."""

    title: str
    part: str
    figure: str
    """a pattern whose `*` is the bar's name"""
    form: str
    unit: str = ""
    """of the bars' names"""
    limit: float | None = None
    """where a dashed line stands"""
    caption: str = ""


PICTURES = (
    Picture(
        "Backward in a fixed order over any order",
        part="order",
        figure="order/*/ours",
        form="x{:.2f}",
        limit=1.0,
        caption="Dashed: as fast as without the switch.",
    ),
    Picture(
        "Host over device, one layer",
        part="host",
        figure="host/* tokens per rank",
        form="x{:.2f}",
        unit=" tokens",
        limit=1.0,
        caption="Of one rank, forward and backward. Right of the line the host is slower.",
    ),
    Picture(
        "Peak memory over its estimate",
        part="memory",
        figure="memory/*, measured over estimated",
        form="x{:.2f}",
        limit=1.0,
    ),
    Picture("Training", part="training", figure="training/*/tokens per second", form="{:,.0f} tokens/s"),
)


def write_page(parts: Sequence[Part], folder: Folder, setting: Mapping[str, Any]) -> None:
    """Write the page and verdicts.json from the records that there are; parts without one are named."""
    records = {part.name: record for part in parts if (record := folder.record(part)) is not None}
    judged = verdicts(records)
    figures = {name: value for record in records.values() if record.judges for name, value in record.figures.items()}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template(TEMPLATE).render(
        css=Markup(STYLE.read_text(encoding="utf-8")),
        headline=headline(parts, records, judged),
        only_a_look=setting["device"] != "cuda" or setting["tiny"],
        verdicts=[
            {"number": v.finding.number, "title": v.finding.title, "kind": v.kind, "words": v.words} for v in judged
        ],
        pictures=[shown for picture in PICTURES if (shown := bars(picture, records)) is not None],
        anchors=[anchor.row(figures) for anchor in ANCHORS],
        parts=[section(part, records.get(part.name)) for part in parts],
        send=what_to_send(folder, records),
    )
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.page.write_text(page, encoding="utf-8")
    (folder.path / "verdicts.json").write_text(
        json.dumps([str(verdict) for verdict in judged], indent=1) + "\n", encoding="utf-8"
    )


def headline(parts: Sequence[Part], records: Mapping[str, Record], judged: Sequence[Verdict]) -> str:
    """How far the run is, and what it found, in a sentence each."""
    status = [records[part.name].status if part.name in records else NOT_RUN for part in parts]
    counts = {kind: status.count(kind) for kind in (DONE, FAILED, OUT_OF_TIME, NOT_POSSIBLE, RUNNING, NOT_RUN)}
    ended = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    kinds = [verdict.kind for verdict in judged]
    judgements = ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in (CONFIRMED, REFUTED, NOT_MEASURED) if kind in kinds
    )
    return f"Of {len(parts)} parts: {ended}. Of {len(judged)} findings: {judgements}."


def bars(picture: Picture, records: Mapping[str, Record]) -> dict[str, Any] | None:
    """Give what the template draws; None without a figure."""
    record = records.get(picture.part)
    before, _, after = picture.figure.partition("*")
    values = {} if record is None else {n: v for n, v in record.figures.items() if fnmatch(n, picture.figure)}
    if record is None or not values:
        return None
    most = max([*values.values(), picture.limit or 0.0]) or 1.0
    return {
        "title": picture.title,
        "caption": picture.caption + ("" if record.judges else " Figures of a CPU or of tiny shapes."),
        "limit": None if picture.limit is None else round(100 * picture.limit / most, 2),
        "bars": [
            {
                "name": name.removeprefix(before).removesuffix(after) + picture.unit,
                "width": round(100 * value / most, 2),
                "number": picture.form.format(Shown(value)),
            }
            for name, value in values.items()
        ],
    }


def section(part: Part, record: Record | None) -> dict[str, Any]:
    """One part of the page."""
    if record is None:
        return {
            "title": part.title,
            "name": part.name,
            "status": NOT_RUN,
            "why": "",
            "tables": [],
            "notes": [],
            "lines": "",
        }
    return {
        "title": part.title,
        "name": part.name,
        "status": f"{record.status}, {record.seconds:.0f} s, {record.device}",
        "why": record.why,
        "tables": [table | {"columns": list(table["rows"][0])} for table in record.tables if table["rows"]],
        "notes": record.notes,
        "lines": "\n".join(record.last_lines),
    }


def what_to_send(folder: Folder, records: Mapping[str, Record]) -> str:
    """A sentence: which files to attach to an issue."""
    failed = [name for name, record in records.items() if record.status in (FAILED, OUT_OF_TIME)]
    files = ["this page", "verdicts.json", "the folder records", *(f"logs/{name}.log" for name in failed)]
    return (
        f"Please open an issue of the project and attach {', '.join(files[:-1])} and {files[-1]}, all in "
        f"{folder.path.name}: they hold versions, names of GPUs and figures, and no data of yours."
    )
