from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.bugfix.language import MAX_VALUE
from examples.bugfix.tokenizer import ACT, END, PAD, VOCABULARY, WordTokenizer, spell


def test_vocabulary_is_small_and_without_repeats() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == WordTokenizer().vocab_size < 100
    assert all(len(word.split()) == 1 for word in VOCABULARY)


@given(st.lists(st.integers(0, len(VOCABULARY) - 1)))
def test_ids_round_trip(token_ids: list[int]) -> None:
    tokenizer = WordTokenizer()
    assert tokenizer.encode(tokenizer.decode(token_ids)) == token_ids


@given(st.integers(-MAX_VALUE, MAX_VALUE))
def test_every_value_has_a_spelling(value: int) -> None:
    tokenizer = WordTokenizer()
    assert int(tokenizer.decode(tokenizer.encode(spell(value))).replace(" ", "")) == value


def test_special_ids() -> None:
    tokenizer = WordTokenizer()
    assert tokenizer.decode([tokenizer.pad_id, tokenizer.act_id, tokenizer.end_id]) == f"{PAD} {ACT} {END}"


def test_unknown_words_and_ids_are_named() -> None:
    tokenizer = WordTokenizer()
    with pytest.raises(ValueError, match="'walk'"):
        tokenizer.encode("run walk")
    for token_id in (-1, len(VOCABULARY)):
        with pytest.raises(ValueError, match=f"the id {token_id},"):
            tokenizer.decode([token_id])
