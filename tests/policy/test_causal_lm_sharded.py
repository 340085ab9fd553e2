"""The policy under FSDP2 on two gloo processes, against the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from lit_rl import CausalLMPolicy, Trajectory, collate
from lit_rl.checks.head import check_head
from lit_rl.checks.packing import check_packing
from lit_rl.testing import oracle_gradient, tiny_policy_model

CASES = {
    "tied": ("qwen3", {"tie_word_embeddings": True}, "after", True),
    "sinks": ("gpt_oss", {}, "after", False),
    "own mask": ("falcon", {}, "before", True),
    "padded": ("recurrent_gemma", {}, "after", False),
}


def work(rank: int, store: str) -> None:
    """What each process does: shards, settles the layout, and compares every gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    attempts = [Trajectory(torch.randint(3, 32, (n,), generator=generator), [True] * n, 0.0) for n in (5, 3, 7, 9)]
    for name, (architecture, overrides, settled, recomputed) in CASES.items():
        model = tiny_policy_model(architecture, dtype=torch.float64, **overrides)
        expected = oracle_gradient(model, attempts, lambda log_probs, _: log_probs.sum())
        policy = CausalLMPolicy(model).train()
        if settled == "before":
            policy.resolve_layout()
        if recomputed:
            policy.gradient_checkpointing_enable()
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        for module in (*layers, policy):
            fully_shard(module, mesh=mesh)
        batch = collate(attempts[2 * rank : 2 * rank + 2], layout=policy.resolve_layout())
        (2 * policy(batch).log_probs.sum()).backward()  # FSDP2 takes the mean over two ranks
        for parameter, value in model.named_parameters():
            gradient = value.grad.full_tensor()
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-6, atol=1e-6, msg=f"{name}: {parameter}")
        for verdict in (check_packing(policy), check_head(policy)):
            assert verdict.ok, f"{name}: {verdict.message}"
    distributed.destroy_process_group()


@pytest.mark.timeout(280)
def test_sharded_policies_agree_with_the_oracle(tmp_path: Path) -> None:
    commands = [[sys.executable, __file__, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, **options) for command in commands]
    try:
        outputs = [process.communicate(timeout=250)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
