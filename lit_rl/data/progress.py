"""Where a checkpoint stopped, put into a form from which the Trainer continues exactly."""

from __future__ import annotations

from typing import Any


def settle_progress(checkpoint: dict[str, Any], *, iteration: int, microbatches: int, per_step: int) -> None:
    """Rewrites the loop state of a checkpoint so that training continues at the start of an optimizer step.

    The weights in a checkpoint are those after its last optimizer step. Gradients of a step that was only begun are
    in no checkpoint, so its microbatches are computed again: the position goes back to the end of the last whole
    step. Lightning also recognises where it stopped by comparing counters that a resumed run no longer keeps in
    line; from the second resumption on, epochs would be repeated. Here the counters are set afresh.

    Args:
        checkpoint: As Lightning loaded it; changed in place.
        iteration: The iteration (epoch) it was saved in.
        microbatches: Microbatches of this iteration on each rank, as far as the Trainer's limit lets it go.
        per_step: Microbatches of each optimizer step.

    Example:
        >>> trackers = ("total", "current")
        >>> batch = {t: dict(ready=7, started=7, processed=7, completed=6) for t in trackers} | {"is_last_batch": False}
        >>> epoch = {t: dict(ready=3, started=3, processed=2, completed=2) for t in trackers}
        >>> step = {"optimizer": {"step": {"total": {"completed": 9}}}}
        >>> loop = {"state_dict": {"combined_loader": [{"microbatches_done": 7}]}, "epoch_progress": epoch,
        ...         "epoch_loop.batch_progress": batch, "epoch_loop.state_dict": {"_batches_that_stepped": 9},
        ...         "epoch_loop.automatic_optimization.optim_progress": step}
        >>> settle_progress({"loops": {"fit_loop": loop}}, iteration=2, microbatches=12, per_step=3)
        >>> loop["state_dict"]["combined_loader"], batch["current"]["ready"], batch["current"]["completed"]
        ([{'microbatches_done': 6}], 6, 5)
    """
    loop = checkpoint["loops"]["fit_loop"]
    batch, epoch = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    done = batch["current"]["processed"] if epoch["current"]["started"] > iteration else 0
    # Whether the epoch counts as processed says nothing: `max_steps` and `should_stop` end one before its time.
    done = microbatches if done >= microbatches else done - done % per_step
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    between = done in (0, microbatches)
    finished = iteration + (done == microbatches)
    # Between iterations every counter agrees; inside one, Lightning saves before the last batch counts as completed.
    _set(epoch, ready=finished + (not between), processed=finished, completed=finished)
    position = 0 if between else done
    _set(batch, ready=position, processed=position, completed=position - (not between))
    batch["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps - (not between)
    for loader in loop["state_dict"].get("combined_loader", []):
        loader["microbatches_done"] = position


def _set(progress: dict[str, Any], *, ready: int, processed: int, completed: int) -> None:
    for tracker in ("total", "current"):
        progress[tracker].update(ready=ready, started=ready, processed=processed, completed=completed)
