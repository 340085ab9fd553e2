"""`lit-rl doctor`: every check on your own model (and data), with a table and an exit status."""

from __future__ import annotations

import argparse
import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lit_rl.options import check_at_least

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

    from lit_rl.callbacks import GradientNormalizationCheck
    from lit_rl.checks.verdict import Verdict
    from lit_rl.policy.module import PolicyModule
    from lit_rl.trajectory import Trajectory

T = TypeVar("T")

NAMES = ("head", "packing", "sampler ratio", "normalization")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `lit-rl doctor`.

    Args:
        parser: Gets the options.
    """
    parser.description = __doc__
    parser.add_argument(
        "--model", required=True, help="folder of a model, or a transformers config.json (random weights)"
    )
    parser.add_argument(
        "--data", help="trajectories as parquet or jsonl, as `to_dataset` writes them; default: random ones"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="token budget of a microbatch, in positions")
    parser.add_argument("--trajectories", type=int, default=16, help="how many trajectories are used")
    parser.add_argument("--layout", choices=["auto", "packed", "padded"], default="auto")
    parser.add_argument("--precision", default="32-true", help="as for `Trainer`")
    parser.add_argument("--accelerator", default="auto", help="as for `Trainer`")


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks and prints one line for each.

    Args:
        arguments: What `add_arguments` declared, parsed.

    Returns:
        0 when all pass, 1 otherwise.

    Raises:
        FileNotFoundError: The model or the data is not there.
        ValueError: The model, the data or an option is not what it should be.
    """
    check_at_least(1, **{"--max-tokens": arguments.max_tokens})
    check_at_least(2, **{"--trajectories": arguments.trajectories})
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(arguments)
    finally:
        logger.setLevel(level)


def _run(arguments: argparse.Namespace) -> int:
    module = load_module(arguments.model, arguments.layout)
    trajectories = load_trajectories(arguments, module)
    failed = 0
    verdicts = examine(module, trajectories, arguments)
    size = f"{len(trajectories)} trajectories, token budget {arguments.max_tokens}"
    print(f"\n{arguments.model}, {size}, precision {arguments.precision}\n")
    for name, verdict in verdicts:
        failed += not verdict.ok
        print(f"  {'PASS' if verdict.ok else 'FAIL'}  {name:<14} {verdict.message}")
    print(f"\n{len(NAMES) - failed} of {len(NAMES)} checks passed\n")
    return int(failed > 0)


def load_module(model: str, layout: Any) -> PolicyModule:
    """Loads the policy to be examined.

    Args:
        model: A folder for `from_pretrained`, or the path of a `config.json`.
        layout: As for `PolicyModule`.

    Returns:
        The module, built.

    Raises:
        FileNotFoundError: There is no such path.
        ValueError: What is there cannot be loaded.
    """
    from transformers import AutoConfig

    from lit_rl.policy.module import PolicyModule

    path = Path(model)
    if not path.exists():
        raise FileNotFoundError(f"`--model` is {model!r}, which does not exist; give a folder or a config.json")

    def load() -> PolicyModule:
        has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
        source = model if has_weights else AutoConfig.from_pretrained(model)
        module = PolicyModule(source, objective="reinforce", learning_rate=0.0, layout=layout, loss_on="scored")
        module.configure_model()
        return module

    return _readable("--model", model, load)


def _readable(option: str, given: str, load: Callable[[], T]) -> T:
    """Says which option was given what cannot be read, whichever way the library that reads it fails."""
    try:
        return load()
    except Exception as error:
        raise ValueError(f"`{option}` is {given!r}, which cannot be read: {type(error).__name__}: {error}") from error


def load_trajectories(arguments: argparse.Namespace, module: PolicyModule) -> list[Trajectory]:
    """Reads the given trajectories, or makes random ones that the policy itself could have sampled.

    Args:
        arguments: `data`, `trajectories` and `max_tokens` are used.
        module: Its vocabulary is drawn from.

    Returns:
        The trajectories.

    Raises:
        FileNotFoundError: The data is not there.
        ValueError: It holds less than 2 trajectories, or something else.
    """
    from datasets import Dataset

    from lit_rl.trajectory import Trajectory, from_dataset

    if arguments.data is not None:
        if not Path(arguments.data).exists():
            raise FileNotFoundError(f"`--data` is {arguments.data!r}, which does not exist")
        read = Dataset.from_parquet if arguments.data.endswith(".parquet") else Dataset.from_json

        def load() -> list[Trajectory]:
            dataset = read(arguments.data)
            return from_dataset(dataset.select(range(min(arguments.trajectories, len(dataset)))))

        # The reader of an empty file finds no column, and says so in a way of its own.
        found = _readable("--data", arguments.data, load) if Path(arguments.data).stat().st_size else []
        if len(found) < 2:
            raise ValueError(f"`--data` is {arguments.data!r} with {len(found)} trajectories; at least 2 are needed")
        return found
    assert module.policy is not None
    generator, size = random.Random(0), module.policy.model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    made = []
    for index in range(arguments.trajectories):
        length = generator.randint(4, max(4, min(64, arguments.max_tokens // 2)))
        prompt = generator.randint(1, length - 2)
        ids = [generator.randrange(size) for _ in range(length)]
        mask = [position >= prompt for position in range(length)]
        made.append(Trajectory(ids, mask, generator.random(), group=str(index // 4), task=str(index // 4)))
    return made


def examine(
    module: PolicyModule, trajectories: list[Trajectory], arguments: argparse.Namespace
) -> list[tuple[str, Verdict]]:
    """Runs all checks; one that raises is a failure with the error as its message.

    Args:
        module: The policy.
        trajectories: At least 2.
        arguments: `max_tokens`, `precision` and `accelerator` are used.

    Returns:
        Name and verdict, in the order of `NAMES`.

    Raises:
        ValueError: There is no such precision or accelerator here.
    """
    from lit_rl.callbacks import GradientNormalizationCheck
    from lit_rl.checks.head import check_head
    from lit_rl.checks.packing import check_packing

    policy = module.policy
    assert policy is not None
    normalization = GradientNormalizationCheck(action="warn")
    trainer = _trainer(arguments, normalization)
    module.to(trainer.strategy.root_device)
    trainer.precision_plugin.convert_module(module)

    def as_in_training(check: Callable[[], Verdict]) -> Verdict:
        policy.resolve_layout()  # Before the context, as in a fit: with full precision less is rounding.
        with trainer.precision_plugin.forward_context():
            return check()

    checks: dict[str, Callable[[], Verdict]] = {
        "head": lambda: as_in_training(lambda: check_head(policy)),
        "packing": lambda: as_in_training(lambda: check_packing(policy)),
        "sampler ratio": lambda: as_in_training(lambda: _sampler_ratio(module, trajectories, arguments.max_tokens)),
        "normalization": lambda: _normalization(module, trajectories, arguments.max_tokens, trainer, normalization),
    }
    return [(name, _guarded(checks[name])) for name in NAMES]


def _trainer(arguments: argparse.Namespace, callback: Callback) -> Trainer:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        return Trainer(
            accelerator=arguments.accelerator,
            devices=1,
            precision=arguments.precision,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error


def _guarded(check: Callable[[], Verdict]) -> Verdict:
    from lit_rl.checks.verdict import Verdict

    try:
        return check()
    except Exception as error:
        return Verdict(False, f"{type(error).__name__}: {error}")


def _sampler_ratio(module: PolicyModule, trajectories: list[Trajectory], max_tokens: int) -> Verdict:
    """Samples from the policy and scores the samples as training does; stored log-probabilities are used if given."""
    import torch

    from lit_rl.checks.sampler_ratio import check_sampler_ratio
    from lit_rl.data.collate import collate
    from lit_rl.data.packing import pack_sequences
    from lit_rl.rollout.engine import TransformersEngine
    from lit_rl.trajectory import Trajectory

    policy = module.policy
    assert policy is not None
    if trajectories[0].log_probs is None:
        prompts = [t.token_ids[: max(1, len(t) // 2)].tolist() for t in trajectories]
        engine = TransformersEngine(policy, end_ids=[])
        made = engine.generate(prompts, max_new_tokens=8, temperature=1.0, seeds=list(range(len(prompts))))
        trajectories = [
            Trajectory(
                prompt + completion.token_ids,
                [False] * len(prompt) + [True] * len(completion.token_ids),
                0.0,
                log_probs=[0.0] * len(prompt) + list(completion.log_probs),
            )
            for prompt, completion in zip(prompts, made, strict=True)
        ]
    layout = policy.layout
    rows = pack_sequences([len(t) for t in trajectories], max(max_tokens, max(len(t) for t in trajectories)))
    ours, samplers = [], []
    for row in rows:
        batch = collate([trajectories[index] for index in row], layout=layout).to(module.device)
        with torch.no_grad():
            ours.append(policy(batch).log_probs)
        assert batch.sampler_log_probs is not None
        samplers.append(batch.sampler_log_probs)
    return check_sampler_ratio(torch.cat(ours), torch.cat(samplers))


def _normalization(
    module: PolicyModule,
    trajectories: list[Trajectory],
    max_tokens: int,
    trainer: Trainer,
    check: GradientNormalizationCheck,
) -> Verdict:
    from lit_rl.checks.verdict import Verdict
    from lit_rl.data.datamodule import PackedDataModule

    longest = max(len(t) for t in trajectories)
    # A budget that splits the trajectories, so that there is something to accumulate.
    budget = max(longest, min(max_tokens, -(-sum(len(t) for t in trajectories) // 3)))
    trainer.fit(module, PackedDataModule(trajectories, max_tokens=budget, missing_rewards="ignore"))
    nothing = Verdict(False, "the run ended before its first optimizer step, so nothing was compared")
    return nothing if check.verdict is None else check.verdict
