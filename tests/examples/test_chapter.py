"""The chapter's figures: cheap rows are derived again and compared with the committed ones, dear ones in small."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from examples.chapter import (
    accounting,
    accumulation,
    budgets,
    design_problems,
    design_review,
    filtering,
    filtering_rows,
    gym,
    logits,
    padding,
    pictures,
    table,
)
from examples.chapter.reproduce import HERE, SECTIONS, options
from lit_rl import CausalLMPolicy, Trajectory

RESULTS = json.loads((HERE / "results.json").read_text())
DEMONSTRATIONS = 320
BUILT = {"14.2": budgets.reproduce, "14.3": logits.arithmetic_rows, "14.6": accounting.arithmetic_rows}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def played():
    """A hardly trained policy never passes, so its episodes get rewards by their number."""
    policy, episodes = gym.first_episodes(DEMONSTRATIONS)
    made_up = [
        Trajectory(e.token_ids, e.action_mask, float(i % 3 == 0), log_probs=e.log_probs, group=e.group, task=e.task)
        for i, e in enumerate(episodes)
    ]
    return policy, made_up


def committed(number: str) -> list[table.Row]:
    return [table.Row(**row) for row in RESULTS[number]["rows"]]


@pytest.mark.parametrize("number", BUILT)
def test_cheap_rows_are_the_committed_ones(number):
    built = BUILT[number]()
    rows = built.rows if isinstance(built, table.Section) else built
    assert rows
    missing = [row for row in rows if row not in committed(number)]
    assert missing == []


def test_measured_rows_are_the_committed_ones():
    rows = committed("14.3")
    measured = logits.measured_rows(RESULTS["14.3"]["data"])
    assert rows[-len(measured) :] == measured


def test_rows_of_the_runs_are_the_committed_ones():
    assert filtering_rows.rows_of(RESULTS["14.5"]["data"]["runs"]) == committed("14.5")
    for row in filtering_rows.waste_rows(RESULTS["14.5"]["data"]["runs"]):
        assert row in committed("14.7")


def test_the_filter_saves_two_fifths_of_the_episodes_within_noise():
    runs = RESULTS["14.5"]["data"]["runs"]
    full, hard = filtering_rows.of_arm(runs, "unfiltered"), filtering_rows.of_arm(runs, "last group")
    assert {run["seed"] for run in full} == {run["seed"] for run in hard} == set(range(filtering_rows.SEEDS))
    assert all(run["iterations"] == 60 for run in runs)
    assert filtering_rows.saved(runs) >= 0.4


def test_readme_shows_the_results():
    readme = (HERE / "README.md").read_text()
    assert table.markdown(RESULTS) in readme
    assert set(RESULTS) == set(SECTIONS)
    assert not any(entry["settings"]["quick"] for entry in RESULTS.values())


def test_every_picture_is_drawn_from_the_results(tmp_path):
    drawn = pictures.draw(RESULTS, tmp_path)
    assert [path.name for path in drawn] == ["figure_14_1.png", "figure_14_2.png", "figure_14_3.png"]
    for path in drawn:
        assert path.stat().st_size > 20_000
        assert (HERE / path.name).exists()


def test_packing_is_right_and_its_mistakes_are_not(played):
    section = padding.reproduce(*played)
    found = section.data["largest_difference_nats"]
    assert found["right"] < 1e-4
    assert found["block_running"] < 1e-4
    assert found["learned_positions"] > 0.1
    assert min(found["running"], found["restarted"]) > 0.1
    assert len(section.rows) == len(committed("14.1"))


def test_one_normalizer_is_exact_and_a_mean_per_microbatch_is_not(played):
    policy, episodes = played
    verdicts = {name: accumulation.MicrobatchMean(policy, episodes).judge(split) for name, split in _splits(episodes)}
    assert not verdicts["sorted"].ok
    assert verdicts["sorted"].figures["distortion_max"] > 1.1
    exact = CausalLMPolicy(gym.model_with(policy.model.state_dict()).double(), layout="packed")
    module = accumulation.MicrobatchMean(exact, episodes)
    reference = module.weighted_gradient([list(range(len(episodes)))])
    for _, split in _splits(episodes):
        assert accumulation.relation(module.weighted_gradient(split), reference)[0] < 1e-10


def _splits(episodes):
    return accumulation.splits(episodes).items()


def test_positions_without_a_cache_are_counted_by_prefix(played):
    _, episodes = played
    slow = sum(index for e in episodes for index in range(1, len(e)) if e.action_mask[index])
    assert sum(map(accounting.uncached_positions, episodes)) == slow


@pytest.mark.parametrize("arm", filtering.ARMS)
def test_every_arm_runs(arm):
    run = filtering.train(filtering.Job(arm, 0, 2, 1, gym.warm_weights(0, DEMONSTRATIONS)))
    assert len(run["episodes"]) == len(run["dead_share"]) == 2
    assert len(run["held_out"]) == 2
    assert run["episodes"][0] == 64


def test_each_design_problem_has_a_symptom_a_check_and_a_fix(played):
    policy, episodes = played
    section = design_problems.reproduce(policy, episodes)
    said = section.data["messages"]
    assert len(section.rows) + 2 == len(committed("14.7"))  # the wasted episodes of 14.5 are added by the whole run
    assert "each microbatch takes the mean over its own tokens" in said["GradientNormalizationCheck"]
    assert "self_attn" in said["layout='packed' on the leaky model"]
    assert "packing leak" in said["check_sampler_ratio"]
    assert "PassRateCurriculum" in said["ZeroAdvantageMonitor"]
    assert "65536" in said["plan_steps(lengths, max_tokens=32_768)"]
    fixed = next(row for row in section.rows if row.figure.startswith("fix: `PolicyModule`"))
    assert len(set(fixed.ours.split(", "))) == 1


def test_design_review_answers_with_numbers():
    assert design_review.worst([1, 5, 2, 2], 2) == 10
    assert "131,072" in design_review.memory()[0]
    assert "524,288" in design_review.memory()[1]
    assert design_review.padding()[-1].startswith("packed under a token budget: 0.0%")
    page = (HERE / "design_review.md").read_text()
    for name in design_review.MEASUREMENTS:
        assert f"python -m examples.chapter.design_review {name}" in page


def test_options_say_where_files_go():
    assert options([]).output == HERE
    assert options(["--quick"]).output != HERE
    assert options(["--section", "14.2"]).section == ["14.2"]
    with pytest.raises(SystemExit):
        options(["--section", "15.1"])


def test_one_section_leaves_the_others_as_they_were(tmp_path):
    path, readme = tmp_path / "results.json", tmp_path / "README.md"
    readme.write_text(f"before\n{table.START}\nold\n{table.END}\nafter\n")
    table.save([table.Section("14.1", "One", [table.Row("a", "1", "2", "b")])], path, {})
    results = table.save([table.Section("14.2", "Two")], path, {})
    table.update_readme(readme, results)
    assert list(results) == ["14.1", "14.2"]
    assert "| a | 1 | 2 | b |" in readme.read_text()
    assert "old" not in readme.read_text()
    assert readme.read_text().startswith("before")
    assert readme.read_text().endswith("after\n")


def test_measured_heads_order_as_the_arithmetic_says():
    chosen = logits.parse(["--tokens", "64", "128", "--vocabulary", "2048", "--width", "16", "--chunk", "16"])
    if torch.cuda.is_available():
        chosen = logits.parse(["--tokens", "64", "128", "--device", "cpu", "--vocabulary", "2048", "--width", "16"])
    found = logits.measure(chosen)
    assert found["full logits"]["128"] > 1.8 * found["full logits"]["64"]
    assert found["lit_rl, one pass"]["128"] < 0.5 * found["full logits"]["128"]
    assert found["lit_rl, two passes"]["128"] < 0.5 * found["full logits"]["128"]
