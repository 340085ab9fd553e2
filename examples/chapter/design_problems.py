"""14.7: the four design problems as demonstrations: the symptom on a dashboard, the check that catches it, the fix.

python -m examples.chapter.design_problems        # all of them, with what the checks say
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from examples.chapter import accumulation, budgets, gym
from examples.chapter.padding import ROW_TOKENS, variants
from examples.chapter.table import Row, Section, gigabytes, percent
from lit_rl import (
    CausalLMPolicy,
    PackedBatch,
    PackedDataModule,
    PolicyModule,
    Trajectory,
    check_packing,
    check_sampler_ratio,
    collate,
    pack_sequences,
    plan_steps,
    rollouts,
)
from lit_rl.callbacks import GradientNormalizationCheck, PassRateCurriculum, ZeroAdvantageMonitor
from lit_rl.rollout.rewards import SingleTurn
from lit_rl.testing import tiny_policy_model
from lit_rl.throughput import ModelShape, memory_breakdown

# Positions of a microbatch. In the padded layout, trajectories of similar length share one.
TOKEN_BUDGETS = (16_384, 2048, 1024, 512)
Messages = dict[str, str]


class MicrobatchMeanPolicy(PolicyModule):
    """A policy module with the first mistake: each microbatch is rescaled to the mean over its own tokens."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        """Undoes the weights of the step, and takes the mean of the microbatch instead."""
        outputs = super().training_step(batch, batch_idx)
        share = float(batch.weights.sum())  # type: ignore[union-attr]  # of the step's tokens
        return outputs | {"loss": outputs["loss"] / (share * self.trainer.accumulate_grad_batches)}


class LeakyModel(nn.Module):
    """A model with the second mistake: it takes `segment_ids`, and attends with a plain causal mask all the same."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone, self.lm_head = model.model, model.lm_head

    def forward(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Tensor:
        """Hidden states [R, L, D]."""
        everything = torch.ones_like(input_ids)
        output: Any = self.backbone(  # type: ignore[operator]
            input_ids=input_ids, position_ids=position_ids, attention_mask=everything, use_cache=False
        )
        return output.last_hidden_state


def loss_normalization(episodes: Sequence[Trajectory], weights: Mapping[str, Tensor]) -> tuple[list[Row], Messages]:
    """Symptom: the gradient's norm moves with the token budget. Check: `GradientNormalizationCheck`."""
    norms: dict[str, list[float]] = {"mistaken": [], "right": []}
    counts = []
    for max_tokens in TOKEN_BUDGETS:
        for name, module in (("mistaken", MicrobatchMeanPolicy), ("right", PolicyModule)):
            trainer = _one_step(
                module(gym.model_with(dict(weights)), loss_on="scored", layout="padded"), episodes, max_tokens
            )
            norms[name].append(float(trainer.callback_metrics["train/grad_norm"]))
        counts.append(trainer.accumulate_grad_batches)
    try:
        wrong = MicrobatchMeanPolicy(gym.model_with(dict(weights)), loss_on="scored", layout="padded")
        _one_step(wrong, episodes, TOKEN_BUDGETS[-1], GradientNormalizationCheck())
        message = "nothing was found"
    except MisconfigurationException as error:
        message = str(error)
    chapters = accumulation.MicrobatchMean(CausalLMPolicy(gym.model_with(dict(weights))), episodes)
    figures = chapters.judge(accumulation.splits(episodes)["sorted"]).figures
    least, most = figures["distortion_min"], figures["distortion_max"]
    microbatches = ", ".join(map(str, counts))
    return [
        Row(
            "loss normalization: weight of a token in the shortest microbatch", "1.93 times", f"{most:.2f} times", _GYM
        ),
        Row("loss normalization: weight of a token in the longest", "0.52 times", f"{least:.2f} times", _GYM),
        Row("loss normalization: factor between them", "3.7", f"{most / least:.1f}", _GYM),
        Row(f"symptom: gradient norm with {microbatches} microbatches", "-", _list(norms["mistaken"]), "the same step"),
        Row("check: `GradientNormalizationCheck`", "-", "stops the run", "message below"),
        Row("fix: `PolicyModule`, gradient norm", "-", _list(norms["right"]), "the same for every split"),
    ], {"GradientNormalizationCheck": message}


def packing_leak(policy: CausalLMPolicy, episodes: Sequence[Trajectory]) -> tuple[list[Row], Messages]:
    """Symptom: trainer and sampler disagree before any update. Checks: the ratio, and `check_packing`."""
    rows = pack_sequences([len(episode) for episode in episodes], ROW_TOKENS)
    read = variants(collate(episodes, rows=rows, row_tokens=ROW_TOKENS))
    with torch.no_grad():
        verdicts = {
            name: check_sampler_ratio(policy(read[name]).log_probs, read[name].sampler_log_probs)  # type: ignore[arg-type]
            for name in ("running", "right")
        }
    shares = {name: verdict.figures["outside_20_percent"] for name, verdict in verdicts.items()}
    leaky = LeakyModel(tiny_policy_model("qwen3"))
    found = check_packing(CausalLMPolicy(tiny_policy_model("qwen3"), layout="packed"))
    try:
        CausalLMPolicy(leaky, layout="packed").resolve_layout()
        message = "nothing was found"
    except ValueError as error:
        message = str(error)
    with warnings.catch_warnings(record=True):
        layout = CausalLMPolicy(leaky, layout="auto").resolve_layout()
    return [
        Row("packing leak, symptom: tokens over 20% from ratio 1", "5.8%", percent(shares["running"]), _LEAK),
        Row("the same when packed right", "0%", percent(shares["right"])),
        Row(
            "check: `check_packing`, leaky and right model",
            "-",
            f"refused, {'passes' if found.ok else 'fails'}",
            "message below",
        ),
        Row("fix: `layout='auto'` for a model that cannot be packed", "padding", layout, "under the same token budget"),
    ], {"check_sampler_ratio": verdicts["running"].message, "layout='packed' on the leaky model": message}


def zero_variance() -> tuple[list[Row], Messages]:
    """Symptom: groups without advantage. Check: `ZeroAdvantageMonitor`. Fix: `PassRateCurriculum`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unfiltered = _toy_waste(ZeroAdvantageMonitor(share=0.3, patience=3))
    said = [str(entry.message) for entry in caught if "zero advantage" in str(entry.message).lower()]
    filtered = _toy_waste(ZeroAdvantageMonitor(share=1.0), PassRateCurriculum(revisit=0))
    return [
        Row("symptom: wasted episodes of a toy, half of whose tasks always pass", "-", f"{unfiltered} of 512"),
        Row("check: `ZeroAdvantageMonitor`", "-", "warns" if said else "silent", "message below"),
        Row("fix: `PassRateCurriculum`, wasted episodes of the toy", "-", str(filtered), "the first look at each"),
    ], {"ZeroAdvantageMonitor": said[0] if said else "nothing was said"}


def long_tail() -> tuple[list[Row], Messages]:
    """Symptom: one microbatch many times the others. Check and fix: a token budget, which is a hard limit."""
    lengths = budgets.long_tail()
    plan = plan_steps(lengths, max_tokens=budgets.BUDGET, layout="padded")
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    own = next(part for part in plan.for_rank(0) if longest in part)
    fixed = budgets.largest(lengths)
    shape = ModelShape.from_config("qwen3-8b")
    memory = {tokens: memory_breakdown(shape, tokens).total for tokens in (fixed, budgets.BUDGET)}
    try:
        plan_steps(lengths, max_tokens=32_768)
        message = "nothing was found"
    except ValueError as error:
        message = str(error)
    planned = f"{len(own)} trajectories, {len(own) * max(lengths[i] for i in own):,} positions"
    return [
        Row("long tail: longest trajectory", "64k, 8 times the median", f"{max(lengths):,} tokens"),
        Row("symptom: its microbatch under a fixed count of 8", "524,288 positions", f"{fixed:,} positions"),
        Row("fix: its microbatch under the token budget", "2 trajectories, 131,072 positions", planned),
        Row(
            "memory of one GPU of 8, 8B model",
            "-",
            f"{gigabytes(memory[fixed])} and {gigabytes(memory[budgets.BUDGET])}",
            "arithmetic; `lit-rl budget` measures it",
        ),
        Row("check: a budget below the longest trajectory", "-", "refused before anything runs", "message below"),
    ], {"plan_steps(lengths, max_tokens=32_768)": message}


_GYM = "another gym and another policy"
_LEAK = "another policy; running positions and a plain causal mask"


def reproduce(policy: CausalLMPolicy, episodes: Sequence[Trajectory], waste: Sequence[Row] = ()) -> Section:
    """Runs all four.

    Args:
        policy: The policy that played the episodes.
        episodes: 64 trajectories.
        waste: Rows about the wasted episodes of 14.5, where it was run.

    Returns:
        Rows, and what the checks said.
    """
    section = Section("14.7", "Design problems in practice: symptom, check, fix")
    parts = (
        loss_normalization(episodes, policy.model.state_dict()),
        packing_leak(policy, episodes),
        zero_variance(),
        long_tail(),
    )
    messages: Messages = {}
    for index, (rows, said) in enumerate(parts):
        section.rows += [*waste, *rows] if index == 2 else rows
        messages |= said
    section.data = {"messages": messages}
    return section


def _one_step(
    module: PolicyModule, episodes: Sequence[Trajectory], max_tokens: int, *callbacks: GradientNormalizationCheck
) -> Trainer:
    trainer = _trainer(max_epochs=1, callbacks=list(callbacks))
    trainer.fit(module, PackedDataModule(episodes, max_tokens=max_tokens))
    return trainer


def _toy_waste(*callbacks: Any) -> int:
    """Wasted episodes of a toy in which half of the tasks always pass and the others pass by chance."""

    def reward(completions: Sequence[Sequence[int]], solved: Sequence[bool], **columns: Any) -> list[float]:
        return [1.0 if done else float(ids[0] % 2) for ids, done in zip(completions, solved, strict=True)]

    tasks = [{"id": f"task-{index}", "prompt": [3, 4 + index], "solved": index % 2 == 0} for index in range(8)]
    source = rollouts(
        SingleTurn(reward), tasks, tasks_per_iteration=8, group_size=8, end_ids=range(32), max_new_tokens=1
    )
    trainer = _trainer(max_epochs=8, callbacks=list(callbacks))
    module = PolicyModule(tiny_policy_model("qwen3", initializer_range=0.02), learning_rate=0.0)
    trainer.fit(module, PackedDataModule(source, max_tokens=512))
    return int(callbacks[0].episodes_wasted)


def _trainer(**settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        **settings,
    )


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def main() -> None:
    from examples.chapter.table import show

    policy, episodes = gym.first_episodes()
    section = reproduce(policy, episodes)
    show([section])
    for name, message in section.data["messages"].items():
        print(f"\n{name}\n  {message}")


if __name__ == "__main__":
    main()
