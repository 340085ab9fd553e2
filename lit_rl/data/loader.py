"""A loader that can be stopped after any microbatch and continued from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

from torch.utils.data import DataLoader

from lit_rl.data.sampler import TokenBudgetSampler


class LoaderState(TypedDict):
    """What a checkpoint holds about the loader: primitives only, so that it loads with `weights_only=True`."""

    microbatches_done: int
    world_size: int
    microbatches: int
    plan: str


class ResumableLoader(DataLoader):
    """A `DataLoader` over one microbatch per item that knows how many were handed out.

    Lightning saves `state_dict()` with its own checkpoint and restores it before the next iteration; microbatches
    that worker processes have fetched ahead do not count.

    Args:
        dataset: Indexed by a list of trajectory indices, gives one microbatch.
        sampler: Yields those lists.
        **keywords: As for `torch.utils.data.DataLoader`; `batch_size` is always `None`.

    Example:
        >>> dataset = type("D", (), {"__getitem__": lambda self, indices: len(indices), "__len__": lambda self: 3})()
        >>> loader = ResumableLoader(dataset, TokenBudgetSampler([3, 3, 3], 4, shuffle=False))
        >>> iterator = iter(loader); state = (next(iterator), loader.state_dict()["microbatches_done"])
        >>> loader.load_state_dict(loader.state_dict()); (state, len(list(loader)))
        ((1, 1), 2)
    """

    def __init__(self, dataset: Any, sampler: TokenBudgetSampler, **keywords: Any) -> None:
        keywords.pop("batch_size", None)
        super().__init__(dataset, sampler=sampler, batch_size=None, **keywords)
        self._done = 0
        self._resume_from = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: nothing is read before the first `next`, so an iterator that Lightning discards costs nothing.
        skip, self._resume_from = self._resume_from, 0
        self._done = skip
        self._token_budget_sampler.skip = skip
        batches = super().__iter__()
        self._token_budget_sampler.skip = 0
        for batch in batches:
            self._done += 1
            yield batch

    @property
    def _token_budget_sampler(self) -> TokenBudgetSampler:
        assert isinstance(self.sampler, TokenBudgetSampler)
        return self.sampler

    def state_dict(self) -> LoaderState:
        """Microbatches handed out in this pass, and the numbers that must be the same to continue from there."""
        return {
            "microbatches_done": self._done,
            "world_size": self._token_budget_sampler.num_replicas,
            "microbatches": len(self),
            "plan": self._token_budget_sampler.plan.fingerprint,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continues after the microbatches that `state` counts.

        Args:
            state: What `state_dict` gave.

        Raises:
            ValueError: The pass was planned otherwise, for other data or another number of processes, so that its
                position means nothing here.
        """
        here = self.state_dict()
        at_the_end = state["microbatches_done"] in (0, state["microbatches"])
        for name in ("world_size", "microbatches"):
            if state[name] != here[name] and not at_the_end:  # type: ignore[literal-required]
                raise ValueError(
                    f"the checkpoint stopped after {state['microbatches_done']} of {state['microbatches']} "
                    f"microbatches with {state['world_size']} processes, but there are {here['microbatches']} "
                    f"microbatches with {here['world_size']} processes now; resume with the same number of processes "
                    "and the same data, or from a checkpoint taken at the end of an iteration"
                )
        if state["plan"] != here["plan"] and not at_the_end:
            raise ValueError(
                f"the checkpoint stopped after {state['microbatches_done']} of {state['microbatches']} microbatches of "
                "another plan: its trajectories, their order, `seed`, `partition`, `cost` or the normalization's "
                "options were others; give the same ones, or resume from a checkpoint taken at the end of an iteration"
            )
        finished = state["microbatches_done"] == state["microbatches"]
        self._resume_from = here["microbatches"] if finished else state["microbatches_done"]
