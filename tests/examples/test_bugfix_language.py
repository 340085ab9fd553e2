from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.bugfix.language import (
    COMPARISONS,
    DIGITS,
    MAX_LINE_WORDS,
    MAX_LINES,
    MAX_STEPS,
    MAX_VALUE,
    NAMES,
    OPERATORS,
    Outcome,
    ProgramSyntaxError,
    parse_line,
    run_program,
)

WORDS = [*NAMES, *DIGITS, *OPERATORS, *COMPARISONS, "=", ":", "if", "while", "repeat"]


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        (["r = 7"], 7),
        (["r = a"], 5),
        (["r = a + b"], 8),
        (["r = b - a"], -2),
        (["r = a * b"], 15),
        (["r = a / b"], 1),
        (["r = b - a", "r = r / 3"], -1),
        (["r = a % b"], 2),
        (["if a > b : r = 1"], 1),
        (["if a < b : r = 1"], 0),
        (["if a == 5 : r = 9"], 9),
        (["repeat 4 : r = r + b"], 12),
        (["r = 0 - 3", "repeat r : r = 9"], -3),
        (["while r < 7 : r = r + b"], 9),
        (["a = a + 1", "r = a"], 6),
        (["repeat 3 : if r < 4 : r = r + b"], 6),
    ],
)
def test_value_of_a_program(lines: list[str], value: int) -> None:
    assert run_program(lines, {"a": 5, "b": 3}) == Outcome(value)


def test_names_start_at_zero_and_inputs_are_not_changed() -> None:
    inputs = {"a": 2}
    assert run_program(["a = a + 1", "r = a + c"], inputs) == Outcome(3)
    assert inputs == {"a": 2}


@pytest.mark.parametrize("operator", ["/", "%"])
def test_division_by_zero_is_an_outcome(operator: str) -> None:
    assert run_program([f"r = 1 {operator} b"], {"b": 0}) == Outcome(None, "zero")


def test_endless_loop_is_an_outcome() -> None:
    assert run_program(["while 1 > 0 : r = r + 0"], {}) == Outcome(None, "limit")
    assert run_program(["while 1 > 0 : while 0 > 1 : r = 1"], {}) == Outcome(None, "limit")
    assert run_program(["r = 9 * 9", "r = r * r", "repeat r : if 0 > 1 : r = 0"], {}) == Outcome(None, "limit")


def test_step_limit_counts_statements() -> None:
    # Each round of the loop is one step for the loop and one for its body; the loop's own statement is one more.
    rounds = (MAX_STEPS - 1) // 2
    assert run_program(["while r < a : r = r + 1"], {"a": rounds}) == Outcome(rounds)
    assert run_program(["while r < a : r = r + 1"], {"a": rounds + 1}) == Outcome(None, "limit")


@pytest.mark.parametrize("sign", [1, -1])
def test_value_limit_holds_in_both_directions(sign: int) -> None:
    assert run_program(["r = a * 1"], {"a": sign * MAX_VALUE}) == Outcome(sign * MAX_VALUE)
    assert run_program(["r = a + b"], {"a": sign * MAX_VALUE, "b": sign}) == Outcome(None, "huge")


def test_repeated_squaring_stops_at_the_first_huge_value() -> None:
    assert run_program(["r = 9", "repeat 9 : r = r * r"], {}) == Outcome(None, "huge")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "r",
        "r =",
        "r = a +",
        "r = a + b + c",
        "r = a = b",
        "5 = a",
        "x = 1",
        "r = 12",
        "r = import",
        "if a > b r = 1",
        "if a + b : r = 1",
        "if a > b :",
        "while : r = 1",
        "repeat : r = 1",
        "repeat 3 r = 1",
        "repeat 3 :",
        "submit",
    ],
)
def test_other_lines_are_syntax_errors(line: str) -> None:
    with pytest.raises(ProgramSyntaxError):
        parse_line(line.split())


def test_size_limits() -> None:
    with pytest.raises(ProgramSyntaxError, match=f"at most {MAX_LINE_WORDS} words"):
        parse_line(("repeat 1 : " * 5 + "r = 1 + 1").split())
    with pytest.raises(ProgramSyntaxError, match=f"1 to {MAX_LINES} lines, got 0"):
        run_program([], {})
    with pytest.raises(ProgramSyntaxError, match=f"got {MAX_LINES + 1}"):
        run_program(["r = 1"] * (MAX_LINES + 1), {})


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=MAX_LINES),
    inputs=st.dictionaries(st.sampled_from(NAMES[:3]), st.integers(-MAX_VALUE, MAX_VALUE)),
)
def test_any_words_are_a_syntax_error_or_have_an_outcome(lines: list[str], inputs: dict[str, int]) -> None:
    check_outcome(lines, inputs)


atoms = st.sampled_from([*NAMES, *DIGITS])
assignments = st.one_of(
    st.builds("{} = {}".format, st.sampled_from(NAMES), atoms),
    st.builds("{} = {} {} {}".format, st.sampled_from(NAMES), atoms, st.sampled_from(OPERATORS), atoms),
)
headers = st.one_of(
    st.just(""),
    st.builds("{} {} {} {} : ".format, st.sampled_from(["if", "while"]), atoms, st.sampled_from(COMPARISONS), atoms),
    st.builds("repeat {} : ".format, atoms),
)


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(st.builds("{}{}{}".format, headers, headers, assignments), min_size=1, max_size=MAX_LINES),
    inputs=st.fixed_dictionaries({name: st.integers(-MAX_VALUE, MAX_VALUE) for name in NAMES[:3]}),
)
def test_any_program_has_an_outcome(lines: list[str], inputs: dict[str, int]) -> None:
    assert check_outcome(lines, inputs)


def check_outcome(lines: list[str], inputs: dict[str, int]) -> bool:
    try:
        outcome = run_program(lines, inputs)
    except ProgramSyntaxError:
        return False
    if outcome.value is None:
        assert outcome.error in ("zero", "huge", "limit")
    else:
        assert outcome.error is None
        assert abs(outcome.value) <= MAX_VALUE
    return True
