"""What is installed: from a wheel, from the source tree, and from the shell."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import lit_rl

ROOT = Path(__file__).parents[1]
PROBE = (
    "import lit_rl.callbacks, sys; assert 'callbacks' not in sys.modules; "
    "print(lit_rl.callbacks.PaddingMonitor.__module__)"
)


def python(code: str, folder: Path, path: Path) -> str:
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(path), *site_packages()]!r}; {code}"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def site_packages() -> list[str]:
    """The dependencies without this project's own editable path entry (`-S` leaves path files unread)."""
    return [entry for entry in sys.path if entry.endswith("site-packages")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_callbacks_once_under_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lit_rl"}
    assert len(names) == len(set(names))
    assert "lit_rl/callbacks/zero_advantage.py" in names
    assert "lit_rl/py.typed" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "lit_rl").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources | {
        f"lit_rl/callbacks/{path.name}" for path in (ROOT / "callbacks").glob("*.py")
    }


def test_callbacks_import_from_the_wheel_and_from_an_uninstalled_checkout(wheel, tmp_path):
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    for path in (unpacked, ROOT):
        assert python(PROBE, tmp_path, path) == "lit_rl.callbacks.padding"


def test_callbacks_import_from_the_installed_project(tmp_path):
    command = [sys.executable, "-c", PROBE]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout.strip()


def test_every_public_name_exists_and_is_documented():
    for name in lit_rl.__all__:
        assert (getattr(lit_rl, name).__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lit_rl.nothing  # noqa: B018


def test_pure_parts_need_neither_lightning_nor_transformers(tmp_path):
    pure = "lit_rl, lit_rl.curriculum, lit_rl.throughput, lit_rl.data.planner, lit_rl.normalization, lit_rl.objectives"
    code = f"import {pure}; assert not {{'lightning', 'transformers'}} & set(sys.modules), sorted(sys.modules)"
    python(code, tmp_path, ROOT)


def test_every_dependency_says_why():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("dependencies = [")
    block = lines[start + 1 : lines.index("]", start)]
    for index, line in enumerate(block):
        if line.strip().startswith('"'):
            assert block[index - 1].strip().startswith("#"), line


def test_constraints_cover_what_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["cli"], *extras["examples"], *extras["peft"]]
    for requirement in declared:
        name = requirement.split("[")[0].split(">")[0].split("<")[0].split("=")[0]
        assert name in pinned, name
