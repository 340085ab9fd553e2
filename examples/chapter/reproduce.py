"""Recomputes every figure of the chapter: a table, `results.json`, the pictures, and the table of README.md.

    python examples/chapter/reproduce.py                          # all of it, under half an hour on two cores
    python examples/chapter/reproduce.py --section 14.2 14.6      # only some; the others keep what they had
    python examples/chapter/reproduce.py --quick                  # under three minutes: one seed, few iterations

A quick run writes to `build/chapter`, so that it does not replace the figures of a whole one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)  # run as a file: the folder of this file would hide the packages

import torch  # noqa: E402

from examples.chapter import (  # noqa: E402
    accounting,
    accumulation,
    budgets,
    design_problems,
    filtering_rows,
    gym,
    logits,
    padding,
    pictures,
    table,
)

HERE = Path(__file__).resolve().parent


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="14.N")
    parser.add_argument("--quick", action="store_true", help="smaller measurements and shorter runs")
    parser.add_argument("--processes", type=int, default=2, help="runs of 14.5 at a time")
    parser.add_argument("--output", type=Path, help="where the files go (default: here; quick: build/chapter)")
    parsed = parser.parse_args(arguments)
    parsed.output = parsed.output or (ROOT / "build" / "chapter" if parsed.quick else HERE)
    return parsed


def padding_section(arguments: argparse.Namespace) -> table.Section:
    return padding.reproduce(*gym.first_episodes())


def budgets_section(arguments: argparse.Namespace) -> table.Section:
    return budgets.reproduce()


def logits_section(arguments: argparse.Namespace) -> table.Section:
    return logits.reproduce(arguments.quick)


def accumulation_section(arguments: argparse.Namespace) -> table.Section:
    return accumulation.reproduce(*gym.first_episodes())


def filtering_section(arguments: argparse.Namespace) -> table.Section:
    return filtering_rows.reproduce(arguments.quick, arguments.processes)


def accounting_section(arguments: argparse.Namespace) -> table.Section:
    return accounting.reproduce(gym.first_episodes()[1])


def design_section(arguments: argparse.Namespace) -> table.Section:
    path = arguments.output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    waste = filtering_rows.waste_rows(results["14.5"]["data"]["runs"]) if "14.5" in results else []
    return design_problems.reproduce(*gym.first_episodes(), waste)


SECTIONS: dict[str, Callable[[argparse.Namespace], table.Section]] = {
    "14.1": padding_section,
    "14.2": budgets_section,
    "14.3": logits_section,
    "14.4": accumulation_section,
    "14.5": filtering_section,
    "14.6": accounting_section,
    "14.7": design_section,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the sections that were asked for, and writes all files after each.

    Args:
        arguments: Of the command line; those of the process by default.
    """
    chosen = options(arguments)
    warnings.filterwarnings("ignore", message=".*(many workers|val_dataloader|LeafSpec|litlogger|GPU available).*")
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    settings = {"quick": chosen.quick}
    for number in sorted(chosen.section):
        started = time.perf_counter()
        section = SECTIONS[number](chosen)
        section.seconds = time.perf_counter() - started
        results = table.save([section], chosen.output / "results.json", settings)
        pictures.draw({number: results[number]}, chosen.output)
        table.update_readme(chosen.output / "README.md", results)
        table.show([section])
        for name, message in section.data.get("messages", {}).items():
            print(f"{name} says:\n  {message}\n")


if __name__ == "__main__":
    main()
