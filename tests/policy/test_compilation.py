from __future__ import annotations

import torch
from torch._dynamo.testing import CompileCounter

from lit_rl import CausalLMPolicy, Trajectory, collate
from lit_rl.data.batch import PackedBatch
from lit_rl.testing import tiny_policy_model


def rows_of_64(count: int) -> list[PackedBatch]:
    """Full rows of 64 slots, with 1, 2, 3... segments."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for segments in range(1, count + 1):
        cuts = torch.randperm(63, generator=generator)[: segments - 1].sort().values + 1
        lengths = torch.tensor([0, *cuts.tolist(), 64]).diff().tolist()
        ids = (torch.randint(3, 32, (length,), generator=generator) for length in lengths)
        batches.append(collate([Trajectory(x, [True] * len(x), 0.0) for x in ids]))
    return batches


def test_the_number_of_segments_compiles_nothing_anew() -> None:
    batches = rows_of_64(20)
    model = tiny_policy_model("qwen3", num_hidden_layers=1)
    policy = CausalLMPolicy(model, layout="packed")
    with torch.no_grad():
        expected = [policy(batch).log_probs for batch in batches]
        hidden = [policy.hidden_states(batch).flatten(0, 1)[batch.predictors] for batch in batches]

        torch._dynamo.reset()
        head_graphs, backbone_graphs = CompileCounter(), CompileCounter()
        head = torch.compile(lambda *a: policy.head(a[0], a[1], temperature=a[2]).log_probs, backend=head_graphs)
        for batch, states, log_probs in zip(batches, hidden, expected, strict=True):
            torch.testing.assert_close(head(states, batch.targets, batch.temperature), log_probs)
        assert head_graphs.frame_count <= 2

        # What lies between the attentions is compiled once for one segment and once for any number of them.
        model.model.compile(backend=backbone_graphs)
        seen = []
        for batch, log_probs in zip(batches, expected, strict=True):
            torch.testing.assert_close(policy(batch).log_probs, log_probs)
            seen.append(backbone_graphs.frame_count)
        assert seen[2:] == [seen[2]] * 18
        assert seen[2] <= 2 * seen[0]
    torch._dynamo.reset()
