"""`lit-rl fit | validate | predict`: a LightningCLI over `PolicyModule` and `PackedDataModule`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Runs a training command; options and YAML files are those of LightningCLI.

    Subclasses are named by `class_path`, in `--model`, `--data` and `--trainer.callbacks`; modules of the folder it is
    called in can be named too. Run
    `lit-rl fit --help` for all options and `lit-rl fit --print_config` for a file to start from;
    `examples/fit.yaml` is a complete one.

    Args:
        arguments: The subcommand and its options.

    Returns:
        0; errors are raised.

    Raises:
        ModuleNotFoundError: The extra `cli` is not installed.
    """
    try:
        import jsonargparse  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`lit-rl fit` needs jsonargparse; install it with `pip install 'lit-rl[cli]'`"
        ) from error
    from lightning.pytorch.cli import LightningCLI

    from lit_rl.cli import TRAINING
    from lit_rl.data.datamodule import PackedDataModule
    from lit_rl.policy.module import PolicyModule

    class TrainingCLI(LightningCLI):
        """The subcommands that `lit-rl` has."""

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            known = LightningCLI.subcommands()
            return {name: known[name] for name in TRAINING}

    # As with `python -m`, but behind everything that is installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    # It warns whenever it is given arguments, which here are the command line's own.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    TrainingCLI(
        PolicyModule,
        PackedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        parser_kwargs={"prog": "lit-rl"},
        args=list(arguments),
    )
    return 0
