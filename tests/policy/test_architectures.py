"""Every architecture that is tiny in a moment, against the oracle."""

from __future__ import annotations

import warnings

import pytest
import torch

from lit_rl import CausalLMPolicy, Trajectory, collate
from lit_rl.testing import oracle_log_probs, tiny_policy_model

# How each is kept apart on a CPU, where the kernels that pack state-space layers are not installed.
SEGMENTS = """
    apertus arcee biogpt bitnet codegen cohere cohere2 ctrl deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense
    jetmoe llama llama4_text ministral mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma
"""
OWN_MASK = "falcon gpt_neo"
PADDED = """
    bamba bloom falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 mamba mamba2 minimax mpt openai-gpt qwen3_5_text
    qwen3_next recurrent_gemma rwkv
"""
CASES = [
    *((name, "segments") for name in SEGMENTS.split()),
    *((name, "own_mask") for name in OWN_MASK.split()),
    *((name, "padded") for name in PADDED.split()),
]
# Parts of these compute in float32 whatever the dtype of the weights is.
FLOAT32_INSIDE = """
    bamba deepseek_v2 deepseek_v3 falcon_h1 falcon_mamba gemma2 glm4_moe gpt_neo granitemoehybrid llama4_text mamba
    mamba2 mpt qwen3_5_text qwen3_next recurrent_gemma vaultgemma
"""


@pytest.mark.parametrize(("architecture", "attention"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_are_the_oracles(architecture: str, attention: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # Beyond the windows and chunks of 4 tokens, two of equal length, one of a single token.
    lengths = (9, 1, 2, 9, 5, 12)
    attempts = [Trajectory(torch.randint(3, 32, (n,), generator=generator), [True] * n, 0.0) for n in lengths]
    model = tiny_policy_model(architecture, dtype=dtype)
    expected = torch.cat([oracle_log_probs(model, attempt)[1:] for attempt in attempts]).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = CausalLMPolicy(model)
        policy.resolve_layout()
    assert policy.attention == attention
    if policy.layout == "packed":
        batches = [collate(attempts), collate(attempts, rows=[[0, 1, 2], [3, 4], [5]], row_tokens=16)]
    else:
        batches = [collate(attempts, layout="padded")]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-6 if architecture in FLOAT32_INSIDE.split() else 1e-10
    for batch in batches:
        with torch.no_grad():
            log_probs = policy(batch).log_probs
        assert log_probs.dtype == dtype
        torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=tolerance)
