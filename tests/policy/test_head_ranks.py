from __future__ import annotations

import pytest

from tests.distributed.launch import GroupFailed, launch


@pytest.fixture(scope="module")
def outcome() -> str:
    """What two processes print, which run one case after the other and stop at the first that is wrong."""
    try:
        return launch("tests.policy.head_worker", [], processes=2, timeout=120.0)
    except GroupFailed as failure:
        return str(failure)


@pytest.mark.parametrize(
    "case",
    ["data_parallel", "sharded_inside_forward", "sharded_on_its_own", "sharded_outside_forward", "sharded_adapter"],
)
def test_two_processes_equal_the_full_computation_in_one(case: str, outcome: str) -> None:
    assert f"{case}: equal" in outcome, outcome
