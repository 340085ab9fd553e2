"""Lengths, problems and the check of every plan that the planner tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from lit_rl.data.cost import SegmentCost

MODEL_COST = SegmentCost(linear=6 * 1.31e9, quadratic=6 * 28 * 1536)


def draw_lengths(name, count, seed, budget=16_384):
    random = np.random.default_rng(seed)
    if name == "lognormal":
        lengths = random.lognormal(7.3, 0.9, count)
    elif name == "bimodal":
        long = random.random(count) < 0.15
        lengths = np.where(long, random.uniform(budget / 2, budget, count), random.uniform(100, 1500, count))
    else:
        lengths = np.where(random.random(count) < 0.2, budget, random.lognormal(7.8, 0.7, count))
    return np.clip(lengths, 64, budget).astype(int)


def size(microbatch, lengths, layout):
    tokens = [lengths[index] for index in microbatch]
    return sum(tokens) if layout == "packed" else len(tokens) * max(tokens, default=0)


def check_invariants(plan, lengths, num_steps, world_size, max_tokens, layout):
    flat = [index for step in plan.microbatches for rank in step for m in rank for index in m]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(type(index) is int for index in flat)
    assert len(plan.microbatches) == plan.num_steps == num_steps
    assert {len(step) for step in plan.microbatches} == {plan.world_size} == {world_size}
    assert {len(rank) for step in plan.microbatches for rank in step} == {plan.microbatches_per_step}
    sizes = [size(m, lengths, layout) for step in plan.microbatches for rank in step for m in rank]
    assert max(sizes) <= max_tokens
    assert plan.num_positions == sum(sizes)
    assert plan.num_tokens == sum(lengths)
    per_step = world_size * plan.microbatches_per_step
    fillers = [sum(not m for rank in step for m in rank) for step in plan.microbatches]
    assert fillers == [max(0, per_step - len(step)) for step in plan.steps]
    assert plan.num_fillers == sum(fillers) == num_steps * per_step - plan.num_microbatches


@st.composite
def problems(draw):
    max_tokens = draw(st.integers(1, 80))
    lengths = draw(st.lists(st.integers(1, max_tokens), max_size=50))
    options = {
        "max_tokens": max_tokens,
        "num_steps": draw(st.integers(1, 4)),
        "world_size": draw(st.integers(1, 5)),
        "layout": draw(st.sampled_from(["packed", "padded"])),
        "objective": draw(st.sampled_from(["lockstep", "rank_total"])),
        "seed": draw(st.integers(0, 5)),
    }
    if draw(st.booleans()):
        options["groups"] = draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    return lengths, options
