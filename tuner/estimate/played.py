"""A priced step with its pipeline schedule played pass by pass, beside the closed form's seconds.

Not covered: zero-bubble schedules, interleaving in groups other than the pipeline's ranks.
"""

from typing import Final

from tuner.estimate.pricing import Priced
from tuner.simulate.pipeline import Pipeline, play

MOST_PASSES: Final = 300_000
"""Forward and backward passes of all ranks; playing more takes longer than an estimate should."""


def played_step_s(own: Priced) -> float | None:
    """Return the seconds of one step, None where the schedule cannot be played or is too long."""
    configuration = own.configuration
    stages, count = configuration.num_stages, configuration.num_microbatches
    is_interleaved = configuration.virtual_pipeline > 1
    if configuration.zero_bubble or 2 * stages * count > MOST_PASSES:
        return None
    if is_interleaved and count % configuration.pipeline:
        return None
    played = play(
        Pipeline(
            forward_s_S=own.stage_seconds("forward_s_SC"),
            backward_s_S=own.stage_seconds("backward_s_SC"),
            num_devices=configuration.pipeline,
            num_microbatches=count,
            send_s=own.seconds("boundary_s"),
        )
    )
    return played.step_s * configuration.rounds + own.seconds("once_s")
