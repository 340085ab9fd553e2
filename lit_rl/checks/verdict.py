"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check, for a program (`ok`, `figures`) and for a person (`message`).

    Args:
        ok: True when what was checked holds.
        message: One or two sentences: what was found, and where it failed what to change.
        figures: The measured numbers by name; the unit is part of the name or said in the check's documentation.

    Example:
        >>> verdict = Verdict(True, "2 segments are isolated", {"leak_nats": 0.0})
        >>> verdict.ok, verdict.figures["leak_nats"]
        (True, 0.0)
    """

    ok: bool
    message: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        raise TypeError("a Verdict is not a boolean; ask for `verdict.ok`")
