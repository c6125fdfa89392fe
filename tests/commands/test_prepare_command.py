"""`hf-longctx prepare`: what it shows, what it leaves, and what it refuses."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast

from hf_longctx.cli import main
from hf_longctx.data.prepared import load_prepared

LENGTHS = [3, 5, 8, 8, 40, 90, 2, 17]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    words = Tokenizer(WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    LlamaConfig().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"text": "word " * length}) for length in LENGTHS]
    (tmp_path / "train.jsonl").write_text("\n".join([*rows, '{"text": ""}', "{", ""]))
    (tmp_path / "held.txt").write_text("word word word")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{path: {{train: [{tmp_path / 'train.jsonl'}], test: {tmp_path / 'held.txt'}}}, eval_split: test}}\n"
        "longctx: {capacity: 64}\n"
    )
    return path


def test_it_shows_what_there_is_and_leaves_a_folder_to_train_on(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "prepared"
    cut = ["longctx.longest_document=32", "longctx.long_documents=split", "longctx.overlap_tokens=8"]
    assert main(["prepare", str(config), "data.bad_rows=skip", *cut, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for part in (
        f"What was left out: {output / 'train' / 'refused.jsonl'}",
        "8 documents, 173 tokens. p50 8, p90 90, p99 90, longest 90",
        "up to          8 ████████████████████████████████████████ 3",
        "2 of 8 documents are longer than 32 tokens",
        "1 documents, 3 tokens",
    ):
        assert part in shown, shown
    assert load_prepared(output / "train").index.lengths.tolist() == LENGTHS
    refused = [json.loads(line) for line in (output / "train" / "refused.jsonl").read_text().splitlines()]
    assert [row["place"].rpartition(", ")[2] for row in refused] == ["line 9", "line 10"]
    assert refused[0]["reason"].startswith("teaches nothing: ")


def test_brackets_and_colons_in_names_are_shown_as_they_are(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # a long path takes two lines of its cell
    (tmp_path / "train.jsonl").rename(tmp_path / "train [raw] :x:.jsonl")
    source = f"data.path={json.dumps('train [raw] :x:.jsonl')}"
    output = Path("prepared [/out]")
    arguments = ["prepare", str(config), source, "data.eval_split=null", "data.bad_rows=skip", "--output", str(output)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for part in ("train [raw] :x:.jsonl", f"train: {output / 'train'}", f"What was left out: {output / 'train'}"):
        assert part in shown, shown


def test_bad_rows_end_it_with_their_line(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["prepare", str(config)]) == 2
    output = capsys.readouterr().err
    assert "train.jsonl, line 10: " in output
    assert "bad_rows='skip'" in output
    assert "Traceback" not in output
