"""Wheel and source distribution: what is in them, and that the wheel works where it is installed and the repository is not."""

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hf_longctx
from tests.worlds.launched import ROOT

pytestmark = pytest.mark.processes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BESIDE = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def ran(*command: Any, folder: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, since a build writes beside them."""
    folder = tmp_path_factory.mktemp("copied")
    copy = folder / "copy"
    files = ran("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT).split("\0")
    for name in files:
        if name.startswith("hf_longctx/") or name in (*BESIDE, "tests/repository/test_packaging.py"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(copy: Path) -> Path:
    folder = copy.parent
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-index")
    ran(*pip, "--no-build-isolation", "--wheel-dir", folder, copy, folder=folder)
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_its_pages_and_its_types_and_nothing_else(wheel: Path):
    assert wheel.name == f"hf_longctx-{PROJECT['version']}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"hf_longctx", f"hf_longctx-{PROJECT['version']}.dist-info"}
    packaged = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_longctx").rglob("*") if path.is_file()}
    packaged = {name for name in packaged if "__pycache__" not in name}
    assert packaged <= names, "every file of the package: modules, pages, py.typed"
    assert "hf_longctx/py.typed" in packaged
    assert not [name for name in names if "test" in Path(name).parts[-1].split("_") and name.endswith(".py")]
    metadata = zipfile.ZipFile(wheel).read(f"hf_longctx-{PROJECT['version']}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in metadata


def test_a_source_distribution_holds_what_a_wheel_is_built_of_and_no_tests(copy: Path):
    build = "from setuptools import build_meta; print(build_meta.build_sdist('..'))"
    name = ran(sys.executable, "-c", build, folder=copy).split()[-1]
    with tarfile.open(copy.parent / name) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    packaged = {str(path.relative_to(copy)) for path in (copy / "hf_longctx").rglob("*") if path.is_file()}
    assert packaged | set(BESIDE) <= names
    made = {"PKG-INFO", "setup.cfg"}  # by setuptools
    assert {file for file in names - packaged - set(BESIDE) - made if ".egg-info/" not in file} == set()


def test_it_works_where_it_is_installed_and_the_repository_is_not(wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Dependencies are this environment's. Files in there that extend the path, as an editable install does, have no effect.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    ran(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=tmp_path)
    shown = ran(
        python, "-c", "import hf_longctx as h; print(h.__version__, h.Layout.__module__, h.__file__)", folder=tmp_path
    )
    version, module, file = shown.split()
    assert (version, module) == (PROJECT["version"], "hf_longctx.layouts.layout")
    assert Path(file).is_relative_to(site.resolve()) or Path(file).is_relative_to(site)
    command = tmp_path / "venv" / "bin" / "hf-longctx"
    assert "Usage: hf-longctx" in ran(command, "--help", folder=tmp_path)
    estimated = ran(command, "estimate", "llama-7b", "--context", "64K", "--gpus", 8, folder=tmp_path)
    assert "zero3" in estimated


def test_the_version_stands_in_one_place():
    version = PROJECT["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert hf_longctx.__version__ == version
    names = ran("git", "ls-files", "hf_longctx/*.py", "scripts", folder=ROOT).split()
    assert not [
        name for name in names if re.search(rf"__version__ = |version=.{re.escape(version)}", (ROOT / name).read_text())
    ]
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", heading) for heading in headings[1:])
