"""`import hf_longctx` is light, its names are there, and the attention implementation is registered however it is imported."""

import subprocess
import sys

import pytest

import hf_longctx
from tests.worlds.patience import PATIENCE

REGISTERED = (
    "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
    "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks\n"
    "assert functions['longctx'].__module__ == 'hf_longctx.models.attention'\n"
    "assert masks['longctx'].__module__ == 'hf_longctx.models.registered'\n"
)


def run(program: str) -> None:
    """Run in a new process, or nothing would be imported there for the first time."""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr


def test_every_name_is_there():
    for name in hf_longctx.__all__:
        assert getattr(hf_longctx, name).__name__ == name
    assert set(hf_longctx.__all__) <= set(dir(hf_longctx))
    with pytest.raises(AttributeError, match="module 'hf_longctx' has no attribute 'Trainer'"):
        _ = hf_longctx.Trainer  # type: ignore[attr-defined]


@pytest.mark.processes
def test_importing_loads_neither_torch_nor_transformers():
    run(
        "import sys, hf_longctx\n"
        "from hf_longctx import Layout, Topology\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )


ORDERS = (
    "import transformers.modeling_utils, hf_longctx",
    "from hf_longctx import patch_model",
    "from hf_longctx.training.trainer import LongContextTrainer",
)


@pytest.mark.processes
def test_the_attention_is_registered_whichever_is_imported_first():
    """Each order in a process of its own, forked from one that has imported torch alone."""
    run(
        "import os, torch\n"
        f"for imports in {ORDERS!r}:\n"
        "    if not (child := os.fork()):\n"
        f"        exec(imports + chr(10) + {REGISTERED!r})\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, imports\n"
    )


@pytest.mark.processes
def test_a_model_is_loaded_by_name_after_a_plain_import():
    """And transformers' module keeps the source, spec and loader that the import system found."""
    run(
        "import hf_longctx\n"
        "from transformers import AutoModelForCausalLM, LlamaConfig\n"
        "config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)\n"
        "model = AutoModelForCausalLM.from_config(config, attn_implementation='longctx')\n"
        "assert model.config._attn_implementation == 'longctx'\n"
        "import inspect, transformers.modeling_utils as models\n"
        "from importlib.machinery import SourceFileLoader\n"
        "assert type(models.__loader__) is SourceFileLoader and models.__spec__.loader is models.__loader__\n"
        "assert 'class AttentionInterface' in inspect.getsource(models)\n" + REGISTERED
    )
