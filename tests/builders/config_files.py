"""The repository's configurations, and one that is valid."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
VALID: dict[str, Any] = {
    "model": {"path": "embedded:smollm2-135m"},
    "data": {"path": "embedded:python-sources"},
    "longctx": {"capacity": 4096},
    "training": {"output_dir": "runs/test"},
}
