"""What `examples/fit.yaml` starts from: a policy of the BugFix gym that has imitated a few demonstrations."""

from __future__ import annotations

from argparse import Namespace

from transformers import Qwen3ForCausalLM

from examples.bugfix.model import build_model
from examples.bugfix.train import imitate


def imitated_policy(number: int = 6000, seed: int = 0) -> Qwen3ForCausalLM:
    """Builds the tiny policy and trains it on scripted episodes, so that some of its attempts pass.

    Args:
        number: Demonstrations, each read once; at least 16.
        seed: Of the weights and the demonstrations.

    Returns:
        The model; an untrained one would never submit a program, and a reward that is always 0 teaches nothing.
    """
    model = build_model(seed)
    imitate(model, Namespace(seed=seed, demonstrations=number, devices=1, max_tokens=2048))
    return model
