"""Rows of the comparison, and the files they end up in."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

START, END = "<!-- table: written by reproduce.py -->", "<!-- end of table -->"
COLUMNS = ("figure", "source", "ours", "why they differ")


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        figure: What was computed.
        source: The chapter's value; a dash where it gives none.
        ours: The value found here.
        why: Why the two differ, where they do.
    """

    figure: str
    source: str
    ours: str
    why: str = ""


@dataclass
class Section:
    """What one section of the chapter came to.

    Attributes:
        number: Such as "14.1".
        title: In words.
        rows: The comparison.
        data: Everything the pictures and the tests need; JSON-like.
        seconds: Wall time.
    """

    number: str
    title: str
    rows: list[Row] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage.

    Example:
        >>> percent(0.7404)
        '74.0%'
    """
    return f"{100 * share:.{digits}f}%"


def gigabytes(count: float) -> str:
    """Bytes as GB (10^9).

    Example:
        >>> gigabytes(2.2e9)
        '2.2 GB'
    """
    return f"{count / 1e9:.1f} GB"


def save(sections: Iterable[Section], path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes sections into the results file; those that were not run keep what they had.

    Args:
        sections: What was run.
        path: The results file.
        settings: How it was run; kept with every section.

    Returns:
        All that the file now holds: section number to its entry.
    """
    results = json.loads(path.read_text()) if path.exists() else {}
    for section in sections:
        entry = asdict(section) | {"seconds": round(section.seconds, 1), "settings": {**settings, **machine()}}
        results[section.number] = {name: value for name, value in entry.items() if name != "number"}
    results = dict(sorted(results.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return results


def machine() -> dict[str, Any]:
    """What the figures were computed on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"cores": os.cpu_count(), "processor": platform.machine(), "gpu": device, "torch": torch.__version__}


def markdown(results: Mapping[str, Any]) -> str:
    """The table of the README.

    Args:
        results: As `save` returns them.

    Returns:
        One Markdown table per section, and what its checks said.

    Example:
        >>> entry = {"title": "Padding", "rows": [{"figure": "rows", "source": "10", "ours": "9", "why": ""}]}
        >>> print(markdown({"14.1": entry}))
        ### 14.1 Padding
        <BLANKLINE>
        | figure | source | ours | why they differ |
        |---|---|---|---|
        | rows | 10 | 9 |  |
    """
    parts = []
    for number, entry in results.items():
        lines = [f"### {number} {entry['title']}", "", f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|"]
        lines += [f"| {row['figure']} | {row['source']} | {row['ours']} | {row['why']} |" for row in entry["rows"]]
        said = entry.get("data", {}).get("messages", {})
        lines += ["", "The checks say:", ""] if said else []
        lines += [f"- `{name}`: *{message}*" for name, message in said.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def update_readme(path: Path, results: Mapping[str, Any]) -> None:
    """Replaces the table between the two markers of a Markdown file.

    Args:
        path: The file; nothing happens where it does not exist.
        results: As `save` returns them.
    """
    if not path.exists():
        return
    pattern = re.compile(re.escape(START) + ".*?" + re.escape(END), flags=re.DOTALL)
    table = f"{START}\n\n{markdown(results)}\n\n{END}"
    path.write_text(pattern.sub(lambda _: table, path.read_text()))


def show(sections: Iterable[Section]) -> None:
    """Prints the comparison.

    Args:
        sections: What was run.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for section in sections:
        table = Table(title=f"{section.number} {section.title} ({section.seconds:.0f} s)", title_justify="left")
        for column in COLUMNS:
            table.add_column(column, overflow="fold")
        for row in section.rows:
            table.add_row(row.figure, row.source, row.ours, row.why)
        console.print(table)
