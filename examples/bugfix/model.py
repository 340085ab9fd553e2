"""The tiny policy of the BugFix gym: a Qwen3-shaped causal LM built from code, with random weights."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from .environment import MAX_EPISODE_TOKENS
from .tokenizer import WordTokenizer


def build_model(seed: int = 0, *, num_layers: int = 2, width: int = 64) -> Qwen3ForCausalLM:
    """Builds the policy network.

    Args:
        seed: Seed of the initial weights; the global random state is left as it was.
        num_layers: Transformer layers.
        width: Hidden width; a multiple of 16, the width of a head.

    Returns:
        A float32 model over the gym's vocabulary with 256 positions and tied embeddings.

    Raises:
        ValueError: `width` is not a positive multiple of 16.

    Example:
        >>> build_model().config.max_position_embeddings
        256
    """
    if width < 16 or width % 16:
        raise ValueError(f"got `width` {width}, expected a positive multiple of 16")
    tokenizer = WordTokenizer()
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        head_dim=16,
        max_position_embeddings=MAX_EPISODE_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.1,  # about 1 / sqrt(width): the usual 0.02 suits widths of thousands
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.end_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()
