"""The word-level tokenizer of the BugFix gym: one id per word, the whole vocabulary in one place.

Numbers are spelled digit by digit, so every value the interpreter can return has a spelling.
"""

from __future__ import annotations

from collections.abc import Iterable

from .language import COMPARISONS, DIGITS, MAX_LINES, NAMES, OPERATORS

PAD = "<pad>"
ACT = "<act>"
END = "<end>"
TOOLS = ("run", "edit", "submit")
LINE_LABELS = tuple(f"L{number}" for number in range(1, MAX_LINES + 1))
KEYWORDS = ("=", ":", "if", "while", "repeat")
COMMENT_WORDS = ("plus", "minus", "times", "over", "mod", "above", "below", "at", "most", "least", "until")
OBSERVATION_WORDS = ("want", "got", "pass", "error", "zero", "huge", "limit")
VOCABULARY = (
    *(PAD, ACT, END),
    *TOOLS,
    *LINE_LABELS,
    *NAMES,
    *DIGITS,
    *OPERATORS,
    *COMPARISONS,
    *KEYWORDS,
    *COMMENT_WORDS,
    *OBSERVATION_WORDS,
)


class WordTokenizer:
    """Maps the words of `VOCABULARY` to ids and back.

    Example:
        >>> tokenizer = WordTokenizer()
        >>> tokenizer.decode(tokenizer.encode("edit L1 r = a + b <end>"))
        'edit L1 r = a + b <end>'
    """

    def __init__(self) -> None:
        self._ids = {word: index for index, word in enumerate(VOCABULARY)}
        self.pad_id = self._ids[PAD]
        self.act_id = self._ids[ACT]
        self.end_id = self._ids[END]

    @property
    def vocab_size(self) -> int:
        """The number of words."""
        return len(VOCABULARY)

    def encode(self, text: str) -> list[int]:
        """Turns words separated by spaces into ids.

        Args:
            text: The words.

        Returns:
            One id per word.

        Raises:
            ValueError: A word is not in the vocabulary.

        Example:
            >>> WordTokenizer().encode("<pad> <act> <end>")
            [0, 1, 2]
        """
        ids = []
        for word in text.split():
            if word not in self._ids:
                raise ValueError(f"got the word {word!r}, expected words of VOCABULARY; numbers are spelled by digit")
            ids.append(self._ids[word])
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Turns ids back into words separated by spaces.

        Args:
            token_ids: Ids in `[0, vocab_size)`.

        Returns:
            The words.

        Raises:
            ValueError: An id is out of range.

        Example:
            >>> WordTokenizer().decode([5, 2])
            'submit <end>'
        """
        words = []
        for token_id in token_ids:
            if not 0 <= token_id < len(VOCABULARY):
                raise ValueError(f"got the id {token_id}, expected ids from 0 to {len(VOCABULARY) - 1}")
            words.append(VOCABULARY[token_id])
        return " ".join(words)


def spell(value: int) -> str:
    """Spells an integer digit by digit.

    Args:
        value: Any integer.

    Returns:
        Its sign, if negative, and its digits, separated by spaces.

    Example:
        >>> spell(-120)
        '- 1 2 0'
    """
    return " ".join(str(value))
