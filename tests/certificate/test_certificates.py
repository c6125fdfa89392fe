"""Certificates: kept on disk until code changes, made by one rank for all, of a user's sizes, and in a run's precision."""

import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hf_longctx import Layout, LongContextPlugin, LongContextTrainer, Segment, patch_model
from hf_longctx.attention.kernels import accumulate
from hf_longctx.certificate import CannotShrink, Certificate, Conditions, as_run, certificate_of, run_check
from hf_longctx.certificate import certificate as certificates
from hf_longctx.certificate import kept_certificates as cache
from hf_longctx.certificate.sharing import made_on_rank_0
from hf_longctx.cli import main
from hf_longctx.config import load_config
from hf_longctx.layouts.layout import LayoutError
from hf_longctx.models import attention
from hf_longctx.models.documents import documents_of
from hf_longctx.models.traits import Traits
from hf_longctx.run import run
from tests.builders.tiny_models import tiny_general, tiny_llama
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state
from tests.worlds.rank_pool import RankPool

GOOD = Certificate("Qwen3ForCausalLM", exact=True, traits=Traits(document_wise=("a.B",)), error=1e-15)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    fresh_process(monkeypatch)
    return tmp_path / "cache" / "certificates"


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has tested."""
    monkeypatch.setattr(certificates, "_CERTIFICATES", {})
    monkeypatch.setattr(as_run, "_CHECKS", {})


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes that are tested, each with a good result."""
    names: list[str] = []

    def test(cls: type, config: Any, tiny: Any = None) -> Certificate:
        names.append(cls.__name__)
        return GOOD

    monkeypatch.setattr(certificates, "_test", test)
    return names


def test_a_certificate_is_kept_on_disk(tested: list[str], monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    model = tiny_general("qwen3")
    first = certificate_of(model)
    fresh_process(monkeypatch)
    assert certificate_of(model) == first
    model.config._name_or_path, model.config.dtype = "elsewhere", torch.bfloat16
    fresh_process(monkeypatch)
    assert certificate_of(model) == first
    assert len(tested) == 1
    assert len(list(own_cache.iterdir())) == 1, "nothing half-written is left"


@pytest.mark.parametrize(
    "content", ["", '{"exact": tru', "[]", '{"exact": true}', "null", '{"model_class": 3}', "[" * 9999]
)
def test_a_corrupt_file_is_ignored_and_written_anew(content: str, tested: list[str], monkeypatch: Any, own_cache: Path):
    model = tiny_general("qwen3")
    first = certificate_of(model)
    (file,) = own_cache.iterdir()
    right = file.read_text()
    file.write_text(content)
    fresh_process(monkeypatch)
    assert certificate_of(model) == first
    assert len(tested) == 2
    assert json.loads(file.read_text()).keys() == json.loads(right).keys()


def test_a_folder_that_cannot_be_written_keeps_nothing(tested: list[str], own_cache: Path):
    own_cache.parent.write_text("a file in the place of the folder")
    assert certificate_of(tiny_general("qwen3")).exact


@pytest.mark.parametrize("result", [replace(GOOD, exact=False), replace(GOOD, exact=False, tested=False)])
def test_what_is_refused_is_tested_again(result: Certificate, monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    # What was missing may be there then.
    monkeypatch.setattr(certificates, "_test", lambda *args: result)
    assert not certificate_of(tiny_general("qwen3")).exact
    assert not own_cache.exists()


def test_the_key_changes_with_class_configuration_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = "from transformers import Qwen3ForCausalLM\nclass Mine(Qwen3ForCausalLM):\n    scale = {}\n"
    (tmp_path / "modeling_mine.py").write_text(source.format(1))
    (tmp_path / "parts_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    cls, config = importlib.import_module("modeling_mine").Mine, tiny_general("qwen3").config

    def key() -> str:
        cache._hash_of_files.cache_clear()  # as in another process
        return cache.key_of(cls, config)

    keys = [key()]
    assert keys == [key()]
    keys.append(cache.key_of(Qwen3ForCausalLM, config))
    (tmp_path / "modeling_mine.py").write_text(source.format(2))
    keys.append(key())
    (tmp_path / "parts_of_mine.py").write_text("imported = 1")
    keys.append(key())
    config.rms_norm_eps = 1e-5
    keys.append(key())
    monkeypatch.setattr(cache, "version", lambda package: "0")
    keys.append(key())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cache, "PACKAGE", tmp_path)
        keys.append(key())
    with monkeypatch.context() as planted:
        planted.setattr(attention, "_over_layout", lambda *args, **features: None)
        keys.append(key())
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", lambda *args: None)
    keys.append(key())
    del sys.modules["modeling_mine"].__file__
    keys.append(key())
    del sys.modules["modeling_mine"]
    assert len(set(keys)) == len(keys) == 10


def test_the_key_stays_when_code_is_compiled():
    """Dynamo writes what it compiled into the globals of the module, under a name that no other process has."""
    config = tiny_general("qwen3").config
    before, names = cache.key_of(Qwen3ForCausalLM, config), set(vars(accumulate))
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    torch.compile(accumulate.merge_, backend="eager")(out, lse, accumulate.Partial(0, 3, out + 1, lse.clone()))
    assert any(name.startswith(cache.COMPILED) for name in set(vars(accumulate)) - names)
    assert cache.key_of(Qwen3ForCausalLM, config) == before


def settings() -> dict[str, Any]:
    """Return what a trainer is made with."""
    return {"plugin": LongContextPlugin(capacity=64), "train_dataset": documents([9, 8], labels=True)}


class OfAllRanks(Qwen3ForCausalLM):
    """A class that only these tests certify."""


def refused_on_rank_0(folder: str) -> tuple[str, float]:
    """Make a trainer of a model that rank 0 finds wanting, and that other ranks must not test."""
    rank = torch.distributed.get_rank()
    fresh_accelerator_state()
    patch = pytest.MonkeyPatch()
    began = time.monotonic()

    def test(cls: type, config: Any, tiny: Any = None) -> Certificate:
        assert rank == 0, "rank 0 tests for all"
        return Certificate(cls.__name__, exact=False, traits=Traits(), reason="planted")

    with patch.context() as planted:
        planted.setattr(certificates, "_test", test)
        try:
            LongContextTrainer(OfAllRanks(tiny_general("qwen3").config), arguments(folder), **settings())
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


def shared() -> tuple[list[str], Certificate]:
    """Return what ranks say of results that rank 0 makes too late, fails to make, and makes for another model; and a good one."""
    rank, messages = torch.distributed.get_rank(), []

    def late() -> Certificate:
        time.sleep(0.5)
        return GOOD

    def fail() -> Certificate:
        raise MemoryError("rank 0 has none left")

    facts = {"config.hidden_size": "64"}
    other = {"config.hidden_size": str(64 + rank)}
    for make, stated, seconds in ((late, facts, 0.2), (fail, facts, 60.0), (lambda: GOOD, other, 60.0)):
        try:
            made_on_rank_0(stated, make, Certificate, seconds)
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages, made_on_rank_0(facts, lambda: replace(GOOD, seconds=float(rank)), Certificate)


@pytest.mark.processes
def test_a_refusal_of_rank_0_reaches_all_ranks(ranks2: RankPool, tmp_path: Path):
    first, second = ranks2.run(refused_on_rank_0, str(tmp_path))
    assert first[0] == second[0]
    assert first[0].startswith("ValueError: OfAllRanks is not computed exactly over layouts: planted. ")
    assert max(first[1], second[1]) < 60


@pytest.mark.processes
def test_ranks_wait_for_rank_0_no_longer_than_they_must(ranks2: RankPool):
    (first, made), (second, read) = ranks2.run(shared)
    assert first == ["", "MemoryError: rank 0 has none left", ""]
    assert second[0].startswith("TimeoutError: rank 1 has waited 0.2 s for the Certificate of rank 0")
    assert second[1].startswith(
        "RuntimeError: rank 0 could not make the Certificate for all ranks: MemoryError: rank 0"
    )
    assert second[2].startswith("ValueError: rank 1 cannot take the Certificate that rank 0 makes for all ranks")
    assert "(config.hidden_size: 65 here, 64 on rank 0)" in second[2], "at once"
    assert made == read == GOOD, "traits and all, and not made twice"


def other_models(folder: str) -> tuple[str, float]:
    """Make a trainer of a model that has another base of its RoPE on rank 1."""
    fresh_accelerator_state()
    config = tiny_general("qwen3").config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1e4 + torch.distributed.get_rank()}
    began = time.monotonic()
    patch = pytest.MonkeyPatch()
    with patch.context() as planted:
        planted.setattr(certificates, "_test", lambda cls, *args: replace(GOOD, model_class=cls.__name__, exact=False))
        try:
            LongContextTrainer(OfAllRanks(config), arguments(folder), **settings())
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


@pytest.mark.processes
def test_ranks_with_other_models_are_told_at_once_what_differs(ranks2: RankPool, tmp_path: Path):
    _, (message, seconds) = ranks2.run(other_models, str(tmp_path))
    assert message.startswith("ValueError: rank 1 cannot take the Certificate that rank 0 makes for all ranks")
    for expected in ("config.rope_parameters: ", "10001.0", "10000.0"):
        assert expected in message
    assert seconds < 60


@pytest.fixture
def cannot_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any, cls: Any = None) -> Any:
        raise CannotShrink("no size is small enough")

    monkeypatch.setattr(certificates, "tiny_configuration", refuse)


@pytest.mark.usefixtures("cannot_shrink")
def test_an_uncertified_model_is_trained_where_that_is_asked_for(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """One with a state, whose documents would run into each other in one call."""
    model, plain = tiny_general("qwen3_next", torch.float64), tiny_general("qwen3_next", torch.float64)
    with pytest.raises(ValueError, match=r"could not be tested.*no size is small.*uncertified=True"):
        patch_model(model)
    fresh_accelerator_state()
    trainer = LongContextTrainer(model, arguments(str(tmp_path)), **settings(), uncertified=True)
    assert "Qwen3NextForCausalLM is uncertified: no tiny copy could be tested" in trainer.certificate
    assert "no size is small enough" in caplog.text
    assert documents_of(model) == "alone"
    ids = torch.arange(32)[None] * 7 % 120
    patch_model(model).eval()
    with pytest.raises(LayoutError, match="one whole document in a micro-batch"):
        model(input_ids=ids, layout=Layout({0: (Segment(0, 0, 23), Segment(1, 0, 9))}))
    logits = model(input_ids=ids, layout=Layout({0: (Segment(0, 0, 32),)})).logits
    assert torch.equal(logits, plain.eval()(input_ids=ids, use_cache=False).logits)


@pytest.mark.usefixtures("cannot_shrink")
def test_a_run_of_an_uncertified_model_says_so_everywhere(tmp_path: Path):
    fresh_accelerator_state()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents([9, 30, 8])))
    tiny_general("qwen3").save_pretrained(tmp_path / "model")
    arguments = {"max_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no"}
    configuration = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "rows.jsonl"), "kind": "tokens"},
        "longctx": {"capacity": 64},
        "training": {"output_dir": str(tmp_path / "run"), **arguments},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(configuration))
    with pytest.raises(ValueError, match="could not be tested"):
        run(load_config(tmp_path / "run.yaml"))
    fresh_accelerator_state()
    run(load_config(tmp_path / "run.yaml", ["model.uncertified=true"]))
    for name in ("run.json", "report.html", "README.md"):
        assert "Qwen3ForCausalLM is uncertified: no tiny copy" in (tmp_path / "run" / name).read_text()


def test_a_model_that_differs_is_refused_uncertified_or_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(certificates, "_test", lambda *args: replace(GOOD, exact=False, reason="planted"))
    with pytest.raises(ValueError, match="is not computed exactly over layouts: planted"):
        patch_model(tiny_general("qwen3"), uncertified=True)


SIZES = {"hidden_size": 48, "vocab_size": 100, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.usefixtures("cannot_shrink")
def test_a_configuration_of_the_users_certifies_for_training(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tiny_general("qwen3").save_pretrained(tmp_path / "model")
    sizes = tmp_path / "tiny.json"
    sizes.write_text(json.dumps(SIZES))
    command = ["certify", str(tmp_path / "model"), "--config", str(sizes)]
    assert main(command) == 0
    assert "Qwen3ForCausalLM: exact over layouts" in capsys.readouterr().out
    fresh_process(monkeypatch)
    monkeypatch.setattr(certificates, "_test", None)
    model = patch_model(Qwen3ForCausalLM.from_pretrained(tmp_path / "model"))
    assert "tiny copy of a given configuration; documents over any ranks" in str(model.longctx_certificate)
    assert model.longctx_certificate.given["hidden_size"] == 48
    check = run_check(model, Conditions("cpu", "float32"))
    assert check.verdict == "within", check.reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds a list"),
        ('{"hiden_size": 48}', "has fields that Qwen3Config lacks: hiden_size"),
        ('{"tie_word_embeddings": true}', "tie_word_embeddings is False in the model, True here"),
        ('{"use_sliding_window": true, "sliding_window": 4}', "sliding_window is None in the model, 4 here"),
        ('{"layer_types": ["sliding_attention", "sliding_attention"]}', "layer_types is"),
        ('{"hidden_size": "wide"}', "makes no Qwen3Config"),
    ],
)
def test_a_configuration_that_is_another_model_is_refused(content: str, message: str, capsys, tmp_path: Path):
    tiny_general("qwen3").config.save_pretrained(tmp_path)
    (tmp_path / "tiny.json").write_text(content)
    assert main(["certify", str(tmp_path), "--config", str(tmp_path / "tiny.json")]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_copy_runs_as_the_model_will(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(tiny_general("qwen3"))
    for conditions in (
        Conditions("cpu", "float32"),
        Conditions("cpu", "float32", "bfloat16"),
        Conditions("cpu", "bfloat16"),
    ):
        check = run_check(model, conditions)
        assert check.verdict == "within", check.reason
        assert check.bound >= as_run.MULTIPLE * as_run.LEAST_EPS * conditions.eps
    fresh_process(monkeypatch)
    monkeypatch.setattr(as_run, "new_run_check", None)
    assert run_check(model, conditions) == check, "from disk"


def test_a_device_is_asked_for_its_name_once(monkeypatch: pytest.MonkeyPatch):
    """The name of a GPU is no device that torch could be asked about."""
    names = {"cpu": "Processor", "cpu:0": "Processor"}
    monkeypatch.setattr(as_run, "_device_name", names.__getitem__)
    check = run_check(patch_model(tiny_general("qwen3")), Conditions("cpu:0", "float32"))
    assert check.verdict == "within", check.reason
    assert check.conditions.startswith("Processor, float32")


def test_a_fault_in_the_runs_precision_refuses_the_run(monkeypatch: pytest.MonkeyPatch):
    """Return which float64 does not show."""
    model, own = patch_model(tiny_general("qwen3")), attention._over_layout

    def lossy(module: Any, tensors: Any, *args: Any, scale: float | None, **features: Any) -> Any:
        return own(
            module, tensors, *args, scale=scale if torch.is_autocast_enabled("cpu") is False else 0.1, **features
        )

    monkeypatch.setattr(attention, "_over_layout", lossy)
    assert run_check(model, Conditions("cpu", "float32")).verdict == "within"
    with pytest.raises(
        ValueError, match=r"as run \(cpu, bfloat16 autocast over float32, kernel auto\): differs: the gradient"
    ):
        run_check(model, Conditions("cpu", "float32", "bfloat16"))


def test_what_a_copy_cannot_show_is_said_to_be_uncovered(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(tiny_general("qwen3"))
    for_gpus = run_check(model, Conditions("cpu", "bfloat16", kernel="flash_attn_2"))
    assert for_gpus.verdict == "not covered"
    assert "the copy's heads do not suit the kernel" in str(for_gpus)
    monkeypatch.setattr(as_run, "LARGEST_BOUND", 1e-9)
    rounded = run_check(model, Conditions("cpu", "float32"))
    assert rounded.verdict == "not covered"
    assert "the plain model itself rounds so much" in rounded.reason


def test_what_fails_over_layouts_alone_is_a_fault_and_refuses_the_run(monkeypatch: pytest.MonkeyPatch):
    model = patch_model(tiny_general("qwen3"))

    def fail(*args: Any, **features: Any) -> Any:
        raise TypeError("planted")

    monkeypatch.setattr(attention, "_over_layout", fail)
    with pytest.raises(
        RuntimeError, match=r"copy of Qwen3ForCausalLM fails over a layout \(cpu, float32.*TypeError: planted"
    ):
        run_check(model, Conditions("cpu", "float32"))


def test_a_precision_that_the_plain_model_does_not_have_is_not_covered(monkeypatch: pytest.MonkeyPatch):
    model, own = patch_model(tiny_general("qwen3")), Qwen3MLP.forward

    def in_wider_ones(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == torch.bfloat16:
            raise RuntimeError("no kernel of this dtype")
        return own(module, hidden)

    monkeypatch.setattr(Qwen3MLP, "forward", in_wider_ones)
    check = run_check(model, Conditions("cpu", "bfloat16"))
    assert (check.verdict, check.reason) == (
        "not covered",
        "the plain copy does not run so either: RuntimeError: no kernel of this dtype",
    )


def test_a_copy_takes_the_kernel_of_the_models_heads(monkeypatch: pytest.MonkeyPatch):
    class Chosen:
        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch.setattr(as_run, "select_kernel", lambda call: Chosen("wide" if call.q.shape[-1] > 64 else "narrow"))
    wide, narrow = tiny_general("qwen3", head_dim=128).config, tiny_general("qwen3").config
    on_cpu = Conditions("cpu", "float32")
    assert as_run._kernel(wide, narrow, on_cpu) == "wide"
    assert as_run._kernel(narrow, narrow, on_cpu) == "auto"
    assert as_run._kernel(wide, narrow, replace(on_cpu, kernel="narrow")) == "narrow"


def test_a_trainer_knows_what_its_model_was_certified_for(tmp_path: Path):
    for model, expected in (
        (tiny_general("qwen3"), "exact over layouts: largest difference "),
        (tiny_llama(), "exact over layouts: largest difference "),
    ):
        fresh_accelerator_state()
        trainer = LongContextTrainer(model, arguments(str(tmp_path), bf16=True), **settings())
        assert trainer.certificate.startswith(expected)
        as_it_runs = "as run (cpu, bfloat16 autocast over float32, kernel auto): "
        assert as_it_runs in trainer.certificate


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (replace(GOOD, exact=False, reason="planted"), "is not computed exactly over layouts: planted"),
        (
            replace(GOOD, exact=False, tested=False, reason="planted"),
            "LlamaForCausalLM is tested by the suite of hf_longctx, and could not be tested here: planted",
        ),
    ],
    ids=["differs", "not tested"],
)
def test_a_model_with_attention_of_ours_is_tested_before_it_trains(
    result: Certificate, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Its code is transformers' as much as ours, and another release may differ."""
    monkeypatch.setattr(certificates, "_test", lambda *args: result)
    fresh_accelerator_state()
    if result.tested:
        with pytest.raises(ValueError, match=message):
            LongContextTrainer(tiny_llama(), arguments(str(tmp_path)), **settings())
    else:
        assert LongContextTrainer(tiny_llama(), arguments(str(tmp_path)), **settings()).certificate == message


def test_what_a_model_is_given_beside_tokens_is_refused():
    """Keywords that may be lost on the way, or change the meaning of logits."""
    model, layout = patch_model(tiny_general("qwen3")), Layout({0: (Segment(0, 0, 9),)})
    for keyword in ({"logits_to_keep": 1}, {"inputs_embeds": torch.zeros(1, 9, 64)}, {"anything": "else"}):
        with pytest.raises(ValueError, match=rf"{next(iter(keyword))}.* came with a layout"):
            model(input_ids=torch.arange(9)[None], layout=layout, **keyword)


def test_a_misspelt_model_type_is_said_to_be_one_before_the_hub_is_asked(capsys, monkeypatch):
    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr("hf_longctx.commands.shared.costs.refuse_unreachable", asked)
    assert main(["certify", "lama"]) == 2
    reason = "'lama' is no directory, no model of the hub that can be read and no model type of transformers"
    assert f"{reason}; did you mean 'llama'?" in " ".join(capsys.readouterr().err.split())
