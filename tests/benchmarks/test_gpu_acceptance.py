"""The acceptance run for GPUs (benchmarks/gpu_acceptance.py) on a CPU with tiny sizes: every part leaves a record, every
finding has a verdict that follows from figures, a run goes on where it was stopped, and what fails is written down. By day some
parts run, by night all.

tests/benchmarks/test_acceptance_on_gpus.py runs what only a GPU runs.
"""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_longctx.cli import main
from tests.builders.training_runs import fresh_accelerator_state
from tests.worlds.browser import browser, open_page
from tests.worlds.launched import ROOT, run
from tests.worlds.rank_pool import RankPool

BENCHMARKS = str(ROOT / "benchmarks")
SETTING = {"device": "cpu", "tiny": True}
SECONDS = 60.0
ON_GPUS_ALONE = {5, 6, 8, 10, 13, 14}
"""Findings whose figures no CPU has."""
BY_DAY = ("environment", "syncs", "order", "packed", "segments", "head", "several")
"""Parts that take seconds: of each kind of record, and of a verb, a program and a table."""
IN_NO_RUN = {2, 4, 18, 19}
"""Findings that take more GPUs than the figures of one machine's first hour, or several."""


def ran_here(part: Any, seconds: float, path: Path, log: Path) -> Any:
    """Runs a part in this process, in place of one of its own."""
    from acceptance.flow import Ended
    from gpu_acceptance import measure_part

    fresh_accelerator_state()
    measure_part(part, "cpu", True, seconds, path)
    fresh_accelerator_state()
    return Ended(0)


def on_rank() -> Any:
    """Do one rank's part of what real ranks measure; they have been started without the benchmarks' folder on their path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        from acceptance import real_ranks

        return real_ranks.on_rank("cpu", True)


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.nightly)])
def flow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> Any:
    """Return the folder of a run, and its parts: a verb run here, other programs forked, its ranks those of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        from acceptance import programs, real_ranks
        from acceptance.catalogue import PARTS
        from acceptance.flow import Folder, run_parts
        from acceptance.page import write_page

        def forked(*arguments: str, seconds: float, **environment: str) -> tuple[int, str]:
            if arguments[:2] == ("-m", "hf_longctx"):
                with redirect_stdout(StringIO()) as output:
                    return main(list(arguments[2:])), output.getvalue()
            ended = run(*arguments, **environment)
            return ended.code, ended.output

        patch.setattr(programs, "run_program", forked)
        patch.setattr(real_ranks, "launch", lambda function, arguments, ranks: ranks2.run(on_rank))
        folder = Folder(tmp_path_factory.mktemp("acceptance"))
        folder.claim(SETTING)
        parts = [part for part in PARTS if request.param == "all" or part.name in BY_DAY]
        assert run_parts(
            parts, folder, "cpu", SECONDS * len(parts), ran_here, lambda: write_page(PARTS, folder, SETTING)
        )
    return folder, parts


def records_of(flow: Any) -> dict[str, Any]:
    folder, parts = flow
    return {part.name: folder.record(part) for part in parts}


@pytest.mark.processes
def test_every_part_leaves_a_record(flow: Any):
    """Without a GPU all of it runs but several GPUs and CUDA's allocator; each way of training learns the same."""
    from acceptance.flow import waiting
    from gpu_acceptance import PARTS

    records = records_of(flow)
    assert {name: record.status for name, record in records.items() if record.status != "done"} == {
        "segments": "not possible here",
        "several": "not possible here",
    }
    if "training" in records:
        for way in ("one at a time", "padded", "packed"):  # in bfloat16
            loss = records["training"].figures[f"training/{way}/loss over that of ours"]
            assert loss == pytest.approx(1.0, abs=2e-3)
    assert "it takes two GPUs, and 0 can be used here" in records["several"].why
    for name, record in records.items():
        assert record.why or record.figures or record.notes or record.tables, name
        assert all(torch.isfinite(torch.tensor(list(record.figures.values())))), name
    folder, parts = flow
    assert waiting(PARTS, folder) == [part for part in PARTS if part not in parts]


@pytest.mark.processes
def test_every_finding_has_a_verdict_and_no_cpu_judges_a_gpu(flow: Any):
    """The figures that rules name are those that parts measure: all but those of GPUs are there after a run on a CPU."""
    from acceptance.findings import FINDINGS, NOT_MEASURED, verdicts

    judgements = verdicts(records_of(flow))
    assert [verdict.finding.number for verdict in judgements] == list(range(1, 21))
    assert {verdict.kind for verdict in judgements} == {NOT_MEASURED}
    judged = {
        v.finding.number
        for v in judgements
        if v.words.startswith("these are figures of a CPU or of tiny shapes, by which")
    }
    folder, parts = flow
    tiny_has_other_lengths = {8}
    measured = {finding.number for finding in FINDINGS if {part.name for part in parts} & set(finding.parts[-1:])}
    assert judged == measured - ON_GPUS_ALONE - IN_NO_RUN - tiny_has_other_lengths
    assert json.loads((folder.path / "verdicts.json").read_text()) == [str(verdict) for verdict in judgements]


@pytest.mark.processes
@pytest.mark.browser
def test_the_page_shows_all_of_it(flow: Any, tmp_path: Path):
    probe = """
    document.querySelectorAll("details").forEach((each) => { each.open = true; });
    return {
      rows: document.querySelectorAll("#verdicts tbody tr").length,
      parts: document.querySelectorAll("details").length,
      bars: document.querySelectorAll(".bars .track").length,
      headline: document.getElementById("headline").textContent,
      send: document.getElementById("send").textContent,
      wide: document.documentElement.scrollWidth - innerWidth,
      cut: [...document.querySelectorAll("table")].filter((table) => table.offsetWidth > innerWidth).length,
    };"""
    from acceptance.catalogue import PARTS

    folder, parts = flow
    opened = open_page(browser(), folder.page, tmp_path, probe, size=(390, 900))
    assert opened.console == []
    assert opened.answer["rows"] == 20
    assert opened.answer["parts"] == len(PARTS)
    assert opened.answer["bars"] > (10 if parts == list(PARTS) else 0)
    assert opened.answer["wide"] <= 0
    assert opened.answer["cut"] == 0
    others = f", {len(PARTS) - len(parts)} not run yet" if len(parts) < len(PARTS) else ""
    assert f"Of {len(PARTS)} parts: {len(parts) - 2} done, 2 not possible here{others}." in opened.answer["headline"]
    assert "attach this page, verdicts.json and the folder records" in opened.answer["send"]


def parts_of(*names: str) -> Any:
    from acceptance.catalogue import Part

    return [Part(name, name.title(), "nowhere:nothing", 1.0) for name in names]


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path):
    """Parts that have ended are not run again; those that failed come after those never begun."""
    from acceptance.flow import Ended, Folder, run_parts
    from acceptance.page import write_page
    from acceptance.record import DONE, Record

    parts, folder, begun = parts_of("a", "b", "c", "d"), Folder(tmp_path / "run"), list[str]()
    stop = {"c"}

    def start(part: Any, seconds: float, path: Path, log: Path) -> Any:
        begun.append(part.name)
        if part.name in stop:
            raise KeyboardInterrupt
        if part.name == "b" and begun.count("b") == 1:
            log.write_text("b is going\nb cannot\n\n")
            return Ended(1)
        Record(part.name, "cpu", True, DONE, figures={"x": 1.0}).write(path)
        return Ended(0)

    def page() -> None:
        write_page(parts, folder, SETTING)

    with pytest.raises(KeyboardInterrupt):
        run_parts(parts, folder, "cpu", SECONDS * 4, start, page)
    failed = folder.record(parts[1])
    assert (failed.status, failed.why, failed.last_lines) == (
        "failed",
        "exit status 1: b cannot",
        ["b is going", "b cannot", ""],
    )
    assert "b cannot" in folder.page.read_text()
    assert "b.log" in folder.page.read_text()
    stop.clear()
    assert run_parts(parts, folder, "cpu", SECONDS * 4, start, page)
    assert begun == ["a", "b", "c", "c", "d", "b"]
    assert {folder.record(part).status for part in parts} == {DONE}
    assert run_parts(parts, folder, "cpu", SECONDS, start, page)
    assert len(begun) == 6


def test_no_part_begins_when_the_time_is_used_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from acceptance.flow import Folder, run_parts

    parts = parts_of("a", "b")
    assert not run_parts(parts, Folder(tmp_path), "cpu", 1.0, lambda *_: pytest.fail("begun"), lambda: None)
    assert "the time is used up before a, b: the same command goes on" in capsys.readouterr().out


def test_a_folder_of_other_sizes_is_refused(tmp_path: Path):
    from acceptance.flow import Folder

    Folder(tmp_path).claim(SETTING)
    Folder(tmp_path).claim(SETTING)
    with pytest.raises(ValueError, match="take another --output"):
        Folder(tmp_path).claim({"device": "cuda", "tiny": False})


@pytest.mark.processes
def test_a_process_that_outlasts_its_time_is_ended_and_keeps_what_it_measured(tmp_path: Path, monkeypatch):
    from acceptance import flow
    from acceptance.record import Record

    measured = Record("long", "cpu", figures={"x": 2.0})
    measured.write(tmp_path / "measured.json")
    program = (
        "import shutil, sys, time; shutil.copy(sys.argv[1], sys.argv[2]); print('measured'); sys.stdout.flush(); "
        "time.sleep(600)"
    )
    (part,) = parts_of("long")
    folder = flow.Folder(tmp_path / "run")
    monkeypatch.setattr(flow, "START_SECONDS", 0.0)
    source = str(tmp_path / "measured.json")
    command = [sys.executable, "-S", "-c", program, source]
    start = flow.in_process_of_its_own(lambda part, seconds, path: [*command, str(path)], cuda=False)
    record = flow.run_part(part, folder, "cpu", 2.0, start)
    assert (record.status, record.figures, record.last_lines) == ("out of time", {"x": 2.0}, ["measured"])
    assert folder.record(part) == record


def numbered() -> Any:
    sys.path.insert(0, BENCHMARKS)
    try:
        from acceptance.findings import FINDINGS
    finally:
        sys.path.remove(BENCHMARKS)
    return [finding for finding in FINDINGS if finding.figure]


@pytest.mark.parametrize("finding", numbered(), ids=lambda finding: str(finding.number))
def test_a_verdict_follows_from_the_figure(finding: Any):
    """On either side of a rule's bound the verdict is another one, and says the figure; a failed part is named instead."""
    from acceptance.catalogue import PARTS
    from acceptance.findings import CONFIRMED, NOT_MEASURED, REFUTED, verdict
    from acceptance.record import Record

    part, (sign, bound) = finding.parts[0], finding.confirmed_if
    assert set(finding.parts) <= {any_part.name for any_part in PARTS}
    name = finding.figure.replace("*", "something")
    below, above = (bound - 0.25, bound + 0.25) if bound else (0.0, 3.0)
    for value, kind in ((below, sign[0] == "<"), (above, sign[0] == ">")):
        for device, tiny in (("cuda", False), ("cuda", True), ("cpu", False)):
            record = Record(part, device, tiny, "done", figures={name: value, "unrelated": 1e9})
            judgement = verdict(finding, {part: record})
            expected = CONFIRMED if kind else REFUTED
            if device == "cuda" and not tiny:
                assert judgement.kind == expected
                assert str(judgement).startswith(f"{finding.number}: {expected}, ")
                assert "{" not in judgement.words
            else:
                assert judgement.kind == NOT_MEASURED
                assert f"of a CPU or of tiny shapes, by which it would be {expected}" in judgement.words
    failed = verdict(finding, {part: Record(part, "cuda", False, "failed", "exit status 1: no memory")})
    assert str(failed) == (
        f"{finding.number}: not measured here, because the part {part} failed: exit status 1: no memory"
    )
    assert verdict(finding, {}).words == f"the part {' or '.join(finding.parts)} has not run yet"


def test_the_words_of_a_verdict():
    from acceptance.findings import verdicts
    from acceptance.record import NOT_POSSIBLE, Record

    order = {"order/one document/ours": 1.62, "order/a long one among 16/ours": 2.31, "order/x/peak": 9.0}
    host = {"host/4096 tokens per rank": 1.4, "host/tokens from which it is quicker": 8192}
    records = {
        "order": Record("order", "cuda", False, "done", figures=order),
        "host": Record("host", "cuda", False, "done", figures=host),
        "several": Record("several", "cuda", False, NOT_POSSIBLE, "it takes two GPUs, and 1 can be used here"),
    }
    words = [str(verdict) for verdict in verdicts(records)]
    assert words[0] == "1: confirmed, x2.31 at worst; setting kept off"
    assert words[7] == (
        "8: confirmed, at 4,096 tokens the host takes x1.40 of the device's time; it is quicker from 8,192 tokens on"
    )
    assert words[13] == "14: not measured here, because it takes two GPUs, and 1 can be used here"
    assert words[18] == "19: not measured here, because it takes hundreds of ranks"


def test_figures_too_small_for_their_format_are_not_printed_as_nothing():
    from acceptance.findings import verdicts
    from acceptance.record import Record, Shown

    figures = {"order/one document/ours": 0.0034}
    judged = verdicts({"order": Record("order", "cuda", False, "done", figures=figures)})
    assert str(judged[0]) == "1: refuted, x0.003 at worst: the setting may be on"
    assert [f"{Shown(value):.0%}" for value in (0.0034, 0.34, 0.0)] == ["0.3%", "34%", "0%"]


def test_published_figures_stand_beside_ours():
    from acceptance.anchors import ANCHORS, LONGEST, SPEED

    figures = {LONGEST: 250_000.0, SPEED.format(32768): 5051.0}
    rows = {(row["published by"], row["setting"]): row for row in (anchor.row(figures) for anchor in ANCHORS)}
    assert rows["DeepSpeed ALST", "Llama-8B, one H100"]["ours / published"] == "0.50"
    assert rows["torchtitan", "Llama 3.1 8B, 32K, 8 x H100"]["ours"] == "5,051 tokens/s a GPU"
    assert rows["torchtitan", "Llama 3.1 8B, 64K, 8 x H100"]["ours"] == "-"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    import gpu_acceptance

    monkeypatch.setattr(gpu_acceptance, "gpu_seen", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py"])
    assert gpu_acceptance.main() == 2
    assert "torch sees none; --device cpu --tiny shows all of it" in capsys.readouterr().err
