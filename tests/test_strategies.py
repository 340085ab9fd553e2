from __future__ import annotations

import copy
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl import strategies
from tests.helpers import quiet_trainer


class Stand(Trainer):
    """A Trainer as far as the strategy is concerned; some cannot be made without their device or package."""

    def __init__(self, strategy, world_size=2):
        self.__dict__.update(_strategy=strategy, _size=world_size)

    strategy = property(lambda self: self._strategy)
    world_size = property(lambda self: self._size)


def unmade(kind):
    return kind.__new__(kind)


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_unsupported_strategies_are_refused_with_what_to_use(kind):
    with pytest.raises(MisconfigurationException, match=rf"`{kind.__name__}` is not supported; use .*FSDP2.* or 'ddp'"):
        strategies.check_strategy(Stand(unmade(kind)))


def test_supported_strategies_pass():
    strategies.check_strategy(Stand(unmade(DDPStrategy)))
    strategies.check_strategy(Stand(unmade(SingleDeviceStrategy), world_size=1))
    with pytest.raises(MisconfigurationException, match="`SingleDeviceStrategy` is not supported"):
        strategies.check_strategy(Stand(unmade(SingleDeviceStrategy), world_size=2))


def test_one_device_is_rank_0_of_1():
    trainer = quiet_trainer(accumulate_grad_batches=3)
    assert strategies.data_parallel_rank_and_size(trainer) == (0, 1)
    assert strategies.gradient_multiplier(trainer) == 3
    assert strategies.planning_objective(trainer) == "rank_total"
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert torch.equal(strategies.sum_over_ranks(trainer, values), values)
    assert strategies.gather_over_ranks("mine") == ["mine"]


def test_gradient_norm_by_hand():
    weight = torch.nn.Parameter(torch.zeros(2))
    assert strategies.gradient_norm([weight]) == 0.0
    weight.grad = torch.tensor([3.0, 4.0])
    assert strategies.gradient_norm([weight, torch.nn.Parameter(torch.zeros(1))]) == 5.0


@pytest.mark.parametrize(
    ("ranks", "stage", "held"), [(2, "FITTING", True), (1, "FITTING", False), (2, "VALIDATING", False)]
)
def test_sigterm_waits_for_all_ranks_where_there_are_others(ranks, stage, held):
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        sigterm = strategies.HeldSigterm()
        trainer = SimpleNamespace(world_size=ranks, state=SimpleNamespace(fn=TrainerFn[stage]))
        for _ in range(2):  # every iteration asks for it
            sigterm.hold(trainer)
        signal.raise_signal(signal.SIGTERM)
        assert (sigterm.received, arrived) == ((1.0, []) if held else (0.0, [signal.SIGTERM]))
        copy.deepcopy(sigterm).release()
        sigterm.release()
        assert arrived == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
