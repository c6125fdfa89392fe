"""Commands of README and of docs/commands.md, as printed and in their order, on the files that the page describes: chats,
texts, a configuration.

The embedded model is a tiny one of random weights with a tokenizer of bytes, where SmolLM2-135M would lie. What takes
minutes is left out by name; tests/commands/test_cli_verbs.py runs those verbs on less.
"""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from hf_longctx import cli
from tests.builders.tiny_embedded import write_embedded
from tests.builders.training_runs import fresh_accelerator_state
from tests.worlds.launched import ROOT

PAGE = ROOT / "docs" / "commands.md"
LEFT_OUT = {
    "simulate": "compiles the planner for 1,024 ranks",
    "profile": "measures for minutes, a model of the reader's",
    "estimate": "counts layers of a real size for many seconds",
}
"""Verbs whose lines are not run, and why."""
LEAVES = {
    "evaluate": "runs/chat/evaluation.json",
    "merge": "runs/chat-merged/model.safetensors",
    "report": "runs/chat/report.html",
    "prepare": "prepared",
    "plan": "plans/plan.html",
}
"""Verbs, and what they leave."""


def lines() -> list[list[str]]:
    """Words of each line of the page that begins with hf-longctx, comments left out; README's are among them."""
    text = PAGE.read_text()
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("hf-longctx ")]


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_LONGCTX_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    write_embedded(tmp_path / "cache")
    shutil.copytree(ROOT / "configs", "configs")
    chat = next(line for line in PAGE.read_text().splitlines() if line.startswith("A line of `my_chats"))
    row = json.loads(chat.partition(" is `")[2].rpartition("`")[0])
    turns = [[{**turn, "content": f"{number} {turn['role']}"} for turn in row["messages"]] for number in range(4)]
    Path("my_chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    texts = [(ROOT / "README.md").read_text()[start : start + 500] for start in range(0, 5000, 500)]
    Path("my_documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("my.yaml").write_text(
        "model: {path: 'embedded:smollm2-135m'}\ndata: {path: my_documents.jsonl}\nlongctx: {capacity: 1k}\n"
        "training: {output_dir: out, use_cpu: true}\n"
    )
    return tmp_path


def test_commands_run_as_printed(described: Path, capsys: pytest.CaptureFixture[str]):
    readme = (ROOT / "README.md").read_text().splitlines()
    of_readme = [shlex.split(line, comments=True)[1:] for line in readme if line.startswith("hf-longctx ")]
    assert of_readme
    assert all(line in lines() for line in of_readme)
    ran = []
    for verb, *arguments in lines():
        if verb in LEFT_OUT:
            continue
        fresh_accelerator_state()
        code, shown = cli.main([verb, *arguments]), capsys.readouterr()
        assert code == 0, f"{verb} {arguments}: {shown.err}{shown.out}"
        assert "Traceback" not in shown.err
        assert verb not in LEAVES or (described / LEAVES[verb]).exists(), f"{verb} {arguments}"
        ran.append(verb)
    assert ran == ["train", "train", "evaluate", "report", "merge", "prepare", "plan"]


@pytest.mark.parametrize("file", ["my_chats.jsonl", "my_documents.jsonl"])
def test_plan_finds_a_tokenizer_for_chats_and_texts(file: str, described: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(f"plan {file} --ranks 4 --capacity 1k --planner hdp".split()) == 0
    shown = capsys.readouterr().out
    assert f"{file} in tokens of embedded:smollm2-135m" in shown
    assert f"{len((described / file).read_text().splitlines())} documents" in shown
