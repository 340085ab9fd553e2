from __future__ import annotations

import json
from collections import Counter

import pytest

from examples.bugfix.language import run_program
from examples.bugfix.tasks import BUG_FAMILIES, NUM_HIDDEN_TESTS, BugFixTask, bugfix_tasks, passes, practice_tasks

SEEDS = (0, 1, 2)


def all_tasks(seed: int) -> list[BugFixTask]:
    training, held_out = bugfix_tasks(seed)
    return [*training, *held_out, *practice_tasks(100, seed)]


@pytest.mark.parametrize("seed", SEEDS)
def test_reference_passes_and_program_fails_visible_and_hidden_tests(seed: int) -> None:
    for task in all_tasks(seed):
        assert len(task["hidden_tests"]) == NUM_HIDDEN_TESTS
        assert passes(task["reference"], [task["visible_test"], *task["hidden_tests"]])
        assert not passes(task["program"], [task["visible_test"]])
        assert not passes(task["program"], task["hidden_tests"])


@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_one_bug_of_the_named_family(seed: int) -> None:
    for task in all_tasks(seed):
        pairs = zip(task["program"], task["reference"], strict=True)
        [(wrong, right)] = [(bad, good) for bad, good in pairs if bad != good]
        assert wrong in BUG_FAMILIES[task["family"]](right)
        differing = sum(a != b for a, b in zip(wrong.split(), right.split(), strict=True))
        assert differing == (2 if task["family"] == "operands" else 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_tests_tell_programs_apart(seed: int) -> None:
    for task in all_tasks(seed):
        assert len({test["want"] for test in [task["visible_test"], *task["hidden_tests"]]}) > 2


@pytest.mark.parametrize("seed", SEEDS)
def test_trace_is_what_the_reference_leaves_after_each_line(seed: int) -> None:
    for task in all_tasks(seed):
        inputs, reference = task["visible_test"]["inputs"], task["reference"]
        assert task["visible_trace"] == [
            run_program(reference[:count], inputs).value for count in range(1, len(reference) + 1)
        ]
        assert task["visible_trace"][-1] == task["visible_test"]["want"]


@pytest.mark.parametrize("seed", SEEDS)
def test_splits_are_disjoint_and_balanced(seed: int) -> None:
    training, held_out = bugfix_tasks(seed)
    references = [tuple(task["reference"]) for task in training + held_out]
    assert len(training) == 20
    assert len(held_out) == 10
    assert len(set(references)) == 30
    assert set(Counter(task["family"] for task in training).values()) == {4}
    assert set(Counter(task["family"] for task in held_out).values()) == {2}
    assert not {tuple(task["reference"]) for task in practice_tasks(500, seed)} & set(references)


def test_every_third_task_has_two_lines() -> None:
    for tasks in ([*bugfix_tasks(0)[0], *bugfix_tasks(0)[1]], practice_tasks(30)):
        assert [len(task["program"]) for task in tasks] == [1, 2, 1] * 10


def test_ids_are_unique() -> None:
    ids = [task["id"] for task in all_tasks(0)]
    assert len(set(ids)) == len(ids)


def test_seed_decides_everything() -> None:
    assert bugfix_tasks(3) == bugfix_tasks(3)
    assert practice_tasks(20, 3) == practice_tasks(20, 3)
    assert practice_tasks(20, 3)[:5] == practice_tasks(5, 3)
    assert bugfix_tasks(3) != bugfix_tasks(4)
    assert practice_tasks(20, 3) != practice_tasks(20, 4)


def test_tasks_are_plain_data() -> None:
    tasks = all_tasks(0)
    assert json.loads(json.dumps(tasks)) == tasks


@pytest.mark.parametrize(
    ("family", "line", "mutants"),
    [
        ("operator", "r = a / b", {"r = a % b", "r = a * b"}),
        ("operator", "if a > b : r = a", set()),
        ("constant", "repeat 4 : r = r + a", {"repeat 3 : r = r + a", "repeat 5 : r = r + a"}),
        ("operands", "r = a - b", {"r = b - a"}),
        ("operands", "r = a + b", set()),
        ("variable", "r = r + a", {"r = r + b", "r = r + c"}),
        ("comparison", "if r < 2 : r = 2", {"if r > 2 : r = 2"}),
    ],
)
def test_bug_families(family: str, line: str, mutants: set[str]) -> None:
    assert set(BUG_FAMILIES[family](line)) == mutants
