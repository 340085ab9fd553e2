from __future__ import annotations

import pytest

from tests.distributed.launch import launch


@pytest.mark.parametrize(
    "case",
    ["data_parallel", "sharded_inside_forward", "sharded_on_its_own", "sharded_outside_forward", "sharded_adapter"],
)
def test_two_processes_equal_the_full_computation_in_one(case: str) -> None:
    assert "equal on both ranks" in launch("tests.policy.head_worker", [case], processes=2, timeout=120.0)
