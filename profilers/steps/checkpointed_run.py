"""A run that launches continue: restore, train to the configured step, save on the way.

Step n of the run is the same whichever launch takes it: data depend on (seed, step), the state is
restored to the bit, and nothing is metered or warmed up. In another layout sums have another order.
"""

import torch.distributed as dist

from profilers.steps.checkpoints.store import CheckpointStore
from profilers.steps.config import Checkpoints, StepConfig, StepReport
from profilers.steps.events import Emit
from profilers.steps.layout import ParallelState
from profilers.steps.run import OnStep, step_report, timed_step
from profilers.steps.training import Training


def run_with_checkpoints(
    config: StepConfig,
    checkpoints: Checkpoints,
    layout: ParallelState,
    emit: Emit,
    *,
    on_step: OnStep = lambda _seconds: None,
) -> StepReport:
    """Train on from the newest checkpoint; every rank returns the same report of this launch.

    Raises:
        RankError: the folders of checkpoints cannot be used, or are another run's.
    """
    training = Training(config, layout)
    emit("model_built")
    store = CheckpointStore(training, config, checkpoints, layout, emit)
    restored_step = store.restore()
    results, losses = [], []
    for step in range(restored_step, checkpoints.total_steps):
        result = timed_step(training, layout, step)
        loss = result.loss.double()
        dist.all_reduce(loss)
        results.append(result)
        losses.append(loss.item())
        seconds = result.second.item()
        on_step(seconds)
        emit("step_done", step=step + 1, seconds=seconds, loss=losses[-1])
        store.save_if_due(step + 1)
    store.finish()
    report = step_report(config, layout, results, losses=losses, restored_step=restored_step)
    emit("finished", step=max(restored_step, checkpoints.total_steps))
    return report
