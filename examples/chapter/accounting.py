"""14.6: positions without a KV cache, rooflines, and the GPU-hours of a run."""

from __future__ import annotations

from collections.abc import Sequence

from examples.chapter.table import Row, Section, percent
from lit_rl import Trajectory
from lit_rl.throughput import ModelShape, StepHours, decode_rate, step_gpu_hours, train_rate

# The model card's rounded count, which the chapter's decode rates are computed with.
PARAMETERS = 8.2e9
GPU = "h200"
SHORT, LONG, LONGER = 2_048, 16_384, 65_536


def uncached_positions(trajectory: Trajectory) -> int:
    """Positions that sampling without a KV cache runs: for every sampled token, all tokens before it.

    Example:
        >>> uncached_positions(Trajectory([7, 3, 9, 4], [0, 0, 1, 1], 0.0))
        5
    """
    return int(trajectory.scored.nonzero().sum())


def cache_rows(episodes: Sequence[Trajectory]) -> list[Row]:
    """What a KV cache saves on the gym's episodes.

    Args:
        episodes: The 64 trajectories of 14.1.

    Returns:
        Rows.
    """
    without, once = sum(map(uncached_positions, episodes)), sum(map(len, episodes))
    why = "another gym and another policy"
    return [
        Row("positions processed without a KV cache", "22,661", f"{without:,}", why),
        Row("positions with one", "2,472", f"{once:,}", why),
        Row("ratio", "9.2", f"{without / once:.1f}", why),
    ]


def arithmetic_rows() -> list[Row]:
    """Rooflines and GPU-hours of Qwen3-8B on H200s, and exercise 6.

    Returns:
        Rows.
    """
    shape = ModelShape.from_config("qwen3-8b")
    step = step_gpu_hours(shape, GPU)
    slow = step_gpu_hours(shape, GPU, busy_fraction=0.25)
    counted = step_gpu_hours(shape, GPU, counting="counted")
    rate = train_rate(shape, GPU, mfu=0.4)
    ratio = rate / decode(shape, 64, LONG)
    return [
        Row("KV cache per token, Qwen3-8B", "147 KB", f"{shape.cache_bytes_per_token() / 1e3:.0f} KB"),
        Row("decode, batch 64, context 2k", "about 8,600 tokens/s", _rate(decode(shape, 64, SHORT))),
        Row("decode, batch 64, context 16k", "about 1,800 tokens/s", _rate(decode(shape, 64, LONG))),
        Row("decode, batch 256, context 16k", "1,935 tokens/s", _rate(decode(shape, 256, LONG))),
        Row("training at 40% MFU", "about 8,000 tokens/s", _rate(rate)),
        Row("training rate over decode rate at 16k", "about 4.5", f"{ratio:.1f}"),
        Row("GPU-hours of a step", "about 1.6", f"{step.total:.2f}"),
        Row("GPU-hours of 300 steps", "about 490", f"{step.run(300):.0f}"),
        Row("share of decoding", "59%", percent(step.share("decode"), 0)),
        Row("share of the training pass", "about a quarter", percent(step.share("update"), 0)),
        Row("busy fraction 0.25 instead of 0.5 adds", "about 1 GPU-hour", f"{slow.total - step.total:.2f} GPU-hours"),
        Row("GPU-hours of a step, attention counted", "-", f"{counted.total:.2f}", _COUNTED),
        *exercise_6(shape, step),
    ]


_COUNTED = "the first-order estimate leaves attention out: at 24k tokens that is not small"


def exercise_6(shape: ModelShape, step: StepHours) -> list[Row]:
    """The same estimate at a context of 64k tokens, and with a KV cache of a quarter of the size.

    Args:
        shape: The model.
        step: The estimate at 16k.

    Returns:
        Rows.
    """
    longer = step_gpu_hours(shape, GPU, context=LONGER)
    smaller = step_gpu_hours(shape, GPU, context=LONGER, cache_scale=0.25)
    grows = longer.decode / step.decode
    return [
        Row(
            "exercise 6: a step at context 64k",
            "-",
            f"{longer.total:.2f} GPU-hours",
            f"only decoding grows, {grows:.1f} times: {step.decode:.2f} to {longer.decode:.2f}",
        ),
        Row(
            "exercise 6: and with a 4 times smaller KV cache",
            "-",
            f"{smaller.total:.2f} GPU-hours",
            f"saves {longer.total - smaller.total:.2f}: a 64k context then reads what 16k read before",
        ),
    ]


def decode(shape: ModelShape, batch: int, context: int) -> float:
    """Tokens per second of one device."""
    return decode_rate(shape, GPU, batch=batch, context=context, parameters=PARAMETERS).tokens_per_second


def reproduce(episodes: Sequence[Trajectory]) -> Section:
    """Computes the section.

    Args:
        episodes: The 64 trajectories of 14.1.

    Returns:
        Rows.
    """
    shape = ModelShape.from_config("qwen3-8b")
    section = Section("14.6", "Throughput accounting (Qwen3-8B on H200s)", cache_rows(episodes) + arithmetic_rows())
    section.data = {"gpu_hours": step_gpu_hours(shape, GPU).by_phase()}
    return section


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f} tokens/s"
