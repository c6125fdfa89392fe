"""The tables of docs/performance.md, from the figures of benchmarks/results/.

    python docs/performance_tables.py           # writes them anew between the page's marks
    python docs/performance_tables.py --check   # exits with 1 where the page says something else; a test does this

A mark is `<!-- table NAME -->`, and the table ends at `<!-- end -->`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).with_name("performance.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LOSS = "difference of loss from plain Trainer's"
MARKED = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def figures(name: str) -> dict[str, float]:
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def training(case: str = "") -> str:
    """case: a prefix of the figures' names."""
    found = {name.removeprefix(case): value for name, value in figures("training").items() if name.startswith(case)}
    ways = dict.fromkeys(name.split("/")[0] for name in found if name.count("/") == 1)
    rows = []
    for way in ways:
        of = {name.split("/")[1]: value for name, value in found.items() if name.startswith(f"{way}/")}
        rows.append(
            [
                f"**{way}**" if way == "ours" else way,
                number(of["tokens per second"], 0),
                number(of["share of one process's speed times the ranks"]),
                number(of["peak bytes of the larger rank"] / 1e9),
                f"{of[LOSS]:.0e}",
                number(100 * of["difference of gradient norm from plain Trainer's"], 1) + " %",
            ]
        )
    return table(["", "tokens/s", "of one process x 2", "GB, larger rank", "loss off by", "gradient norm off by"], rows)


def attention(case: str) -> str:
    found = figures("attention")
    prefix = f"{case}/4 ranks/"
    ways = list(dict.fromkeys(name.split("/")[2] for name in found if name.startswith(prefix)))
    columns = {
        "time / limit": "slowest rank over the limit",
        "bytes / zigzag ring": "bytes over a zigzag ring's",
        "peak memory / limit": "peak memory over the limit",
    }
    rows = []
    for way in ways:
        cells = [found.get(f"{prefix}{way}/{name}") for name in columns.values()]
        if any(cell is not None for cell in cells):
            rows.append([f"**{way}**" if way.startswith("ours") else way, *map(number, cells)])
    return table(["", *columns], rows)


def planner() -> str:
    found, sizes = figures("planner"), ("1000 documents on 64", "10000 documents on 1024", "100000 documents on 16384")
    ways = {
        "hdp async": "**hdp**",
        "hdp lockstep": "**hdp**, in rounds",
        "bytescale_balanced async": "ByteScale, Alg. 2",
        "bytescale_naive async": "ByteScale, Alg. 1",
        "Megatron-Core BalancedCPScheduler": "Megatron-Core",
        "verl": "verl",
        "dynamic_cp async": "dynamic context parallelism, powers of two",
        "static_cp async": "static context parallelism, a degree for this batch",
        "static_cp_unpacked async": "the same, unpacked",
    }
    rows = []
    for way, shown in ways.items():
        of = [f"lognormal_pareto/{size} ranks/rich/{way}" for size in sizes]
        cells = [number(found.get(f"{name}/makespan over the lower bound"), 3) for name in of]
        seconds = [found.get(f"{name}/planning CPU ms") for name in of]
        if cells[0]:
            rows.append([shown, *cells, number(seconds[-1], 0)])
    return table(["makespan / lower bound", *(f"{size} ranks" for size in sizes), "planning, ms of CPU"], rows)


def trust() -> str:
    predicted, estimated = figures("prediction"), figures("estimate")
    saving, trials, memory = figures("checkpoint"), figures("faults"), figures("memory")
    errors = {
        sharding: max(
            error for name, error in estimated.items() if f"/{sharding}, " in name and name.endswith("/error")
        )
        for sharding in ("ddp", "zero1", "zero2", "zero3")
    }
    waits = "ddp/wait for a save over a blocking save's"
    rows = [
        [
            "step time, predicted from a profile: median error, 2 ranks",
            f"{100 * predicted['2 ranks, wall/median error']:.1f} %",
        ],
        ["the same, on 4 ranks", f"{100 * predicted['4 ranks, CPU/median error']:.1f} %"],
        *([f"memory, estimated: largest error of {name}", f"{100 * error:.1f} %"] for name, error in errors.items()),
        ["attention's memory, 65,536 over 32,768 tokens", number(memory["causal/65536 over 32768 tokens"])],
        ["training waits for a checkpoint, over a blocking save", f"{100 * saving[waits]:.1f} %"],
        [
            "checkpoints lost or invalid after kills while saving",
            f"{saving['kills/invalid or lost checkpoints']:.0f} of {saving['kills']:.0f}",
        ],
        [
            "trials of faults with a document lost or repeated, or a hang",
            f"{trials['trials with a problem']:.0f} of {trials['trials']:.0f} ({trials['faults']:.0f} faults)",
        ],
    ]
    return table(["", "measured"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "training": training,
    "training_long": lambda: training("long documents/"),
    "attention_one": lambda: attention("one document"),
    "attention_packed": lambda: attention("15 packed documents"),
    "planner": planner,
    "trust": trust,
}


def filled(page: str) -> str:
    """The page with its tables as the results say them."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[4]}", page)


if __name__ == "__main__":
    now = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        sys.exit(
            now != filled(now)
            and f"{PAGE.name} is not what benchmarks/results say: run python docs/performance_tables.py"
        )
    PAGE.write_text(filled(now))
