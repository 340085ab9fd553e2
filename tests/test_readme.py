"""The example of the README runs as it stands, with one process and with two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, run

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("devices", [1, 2])
def test_the_example_runs_as_shown(devices, tmp_path):
    (code,) = re.findall(r"tests/test_readme.py -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    file = tmp_path / "train.py"
    file.write_text(code.replace("devices=1", f"devices={devices}"))
    output = run([str(file)], folder=tmp_path, timeout=500)
    assert "max_epochs=40" in output
    assert float(re.findall(r"^tensor\((.*)\)$", output, flags=re.MULTILINE)[0]) > 0.3  # 1 in 16 before
    assert list(Path(tmp_path).rglob("metrics.csv"))


def test_every_callback_is_in_the_table():
    import lit_rl.callbacks

    for name in lit_rl.callbacks.__all__:
        assert f"| `{name}` |" in README
