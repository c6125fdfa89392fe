"""Trainer's log -> charts over optimizer steps. A colour says where a number is from (page/run.css):

measured, held-out    what training measured; what was measured of documents that were held out
planned, chosen       what the plan predicts; what the user set
length-0 to length-7  documents of one bucket of lengths, the same in every run
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_longctx.report.pictures.canvas import byte_unit
from hf_longctx.report.pictures.line_chart import Curve, curve_of, line_chart

BUCKET = "loss_by_length/"
COLOURS = 8
"""Colours for lengths of documents."""


def charts(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Charts of what there is in Trainer's log, as page/run_page.html.j2 draws them."""

    def curve(key: str, name: str, colour: str, **options: Any) -> Curve:
        return curve_of(log, key, name, colour, **options)

    def loss(value: float) -> str:
        return f"{value:.4g}"

    exchanged = [entry["exchanged_mib"] for entry in log if isinstance(entry.get("exchanged_mib"), (int, float))]
    unit, size = byte_unit(2**20 * max(exchanged, default=0))
    buckets = sorted({key for entry in log for key in entry if key.startswith(BUCKET)}, key=_place)
    by_length = [curve(key, key.removeprefix(BUCKET).replace("_", " "), f"length-{_place(key)}") for key in buckets]
    drawn = [
        line_chart(
            "Loss per token",
            [curve("loss", "training", "measured"), curve("eval_loss", "held out", "held-out", dashed=True)],
            loss,
        ),
        line_chart(
            "Training loss by length of document",
            by_length,
            loss,
            caption="Tokens of a document, K is 1,024. Of all label tokens since the log before.",
        ),
        line_chart(
            "Tokens per second", [curve("tokens_per_second", "all ranks", "measured")], "{:,.4g}".format, least=0
        ),
        line_chart(
            "Model FLOPs utilisation",
            [curve("mfu", "MFU", "measured", factor=100)],
            "{:.4g} %".format,
            unit="%",
            least=0,
        ),
        line_chart(
            "Seconds a step",
            [
                curve("predicted_step_seconds", "planned", "planned"),
                curve("measured_step_seconds", "measured", "measured"),
            ],
            "{:.4g} s".format,
            unit="s",
            least=0,
        ),
        line_chart(
            "Planned: makespan over lower bound", [curve("plan_balance", "plan", "planned")], "{:.4g}".format, least=1
        ),
        line_chart(
            "Planned: ranks idle",
            [curve("plan_idle", "plan", "planned", factor=100)],
            "{:.3g} %".format,
            unit="%",
            least=0,
        ),
        line_chart(
            "Waiting for other stages",
            [curve("stage_wait", "rank 0", "measured", factor=100)],
            "{:.3g} %".format,
            unit="%",
            least=0,
        ),
        line_chart(
            "Keys, values and gradients exchanged a step",
            [curve("exchanged_mib", "all ranks", "measured", factor=2**20 / size)],
            lambda amount: f"{amount:.4g} {unit}",
            unit=unit,
            least=0,
            caption="With what stages of a pipeline send each other."
            if any("stage_wait" in line for line in log)
            else "",
        ),
        line_chart(
            "Peak memory of the fullest rank",
            [curve("peak_memory_gib", "so far", "measured")],
            "{:.4g} GiB".format,
            unit="GiB",
            least=0,
        ),
        line_chart(
            "Waiting for documents",
            [curve("data_wait_seconds", "rank 0", "measured")],
            "{:.3g} s".format,
            unit="s",
            least=0,
        ),
        line_chart("Gradient norm", [curve("grad_norm", "before clipping", "measured")], "{:.4g}".format, least=0),
        line_chart("Learning rate", [curve("learning_rate", "at the step", "chosen")], "{:.3g}".format, least=0),
    ]
    return [chart for chart in drawn if chart is not None]


def _place(key: str) -> int:
    """A bucket's place among the colours: to_256 is 0, to_1K 1, to_4K 2 ... over_1M 7, whichever of them a run has."""
    words = key.removeprefix(BUCKET)
    number = words.rpartition("_")[2]
    digits = number.rstrip("KM")
    tokens = int(digits) * {"K": 2**10, "M": 2**20}.get(number[-1], 1) if digits.isdecimal() else 0
    return min(COLOURS - 1, max(0, (tokens.bit_length() - 9) // 2) + words.startswith("over"))
