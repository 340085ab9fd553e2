"""The demo's table and picture, also of a run in which nothing was learned."""

from __future__ import annotations

import re

from examples.bugfix.report import print_table, save_picture

ALWAYS = "rollout/trajectories,rollout/pass_rate,val/pass_rate,zero_advantage/groups,padding/real,padding/positions"


def report(folder, header, rows):
    lines = [f"epoch,step,{header}", *(",".join(map(str, row)) for row in rows)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    picture = save_picture(folder)
    print_table({"val/pass_rate": 0.0}, {"val/pass_rate": 0.5}, folder, 1.0, 2.0, picture)
    assert picture.stat().st_size > 10_000


def test_a_run_without_any_signal_is_reported(tmp_path, capsys):
    report(tmp_path, ALWAYS, [(i, i, 16, 0.0, 0.0, 1.0, 0, 1) for i in range(3)])
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "groups without signal, last 3 iterations 100.0%" in shown
    assert "No group had a signal" in shown
    assert "padding, as packed -" in shown


def test_padding_is_taken_over_the_whole_run(tmp_path, capsys):
    header = f"{ALWAYS},padding/padded_layout_positions"
    report(tmp_path, header, [(0, 0, 16, 0.5, 0.1, 0.5, 100, 100, 400), (1, 1, 16, 0.6, 0.2, 0.5, 0, 1, 0)])
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "padding, if the batches were padded 75.0%" in shown
    assert "padding, as packed 0.0%" in shown
    assert "No group had a signal" not in shown
