from __future__ import annotations

import pytest
import torch

from examples.bugfix.environment import MAX_EPISODE_TOKENS
from examples.bugfix.model import build_model
from examples.bugfix.tokenizer import WordTokenizer


def test_model_fits_the_gym() -> None:
    model, tokenizer = build_model(), WordTokenizer()
    assert model.config.vocab_size == tokenizer.vocab_size
    assert model.config.max_position_embeddings == MAX_EPISODE_TOKENS == 256
    assert model.config.eos_token_id == tokenizer.end_id
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    logits = model(input_ids=torch.tensor([tokenizer.encode("a plus b L1 r = a - b <act>")])).logits
    assert logits.shape == (1, 10, tokenizer.vocab_size)
    assert logits.dtype == torch.float32


def test_seed_decides_the_weights_and_nothing_else() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, again, other = build_model(1), build_model(1), build_model(2)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [next(iter(model.parameters())) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("width", [0, 40])
def test_width_that_no_head_divides_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"`width` {width}"):
        build_model(width=width)
