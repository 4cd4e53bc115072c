"""A priced step with its pipeline schedule played pass by pass, beside the closed form's seconds.

Not covered: zero-bubble schedules, interleaving in groups other than the pipeline's ranks.
"""

from tuner.estimate.prices import Priced
from tuner.simulate.pipeline import Pipeline, can_be_played, play


def played_step_s(own: Priced) -> float | None:
    """Return the seconds of one step, None where the schedule cannot be played."""
    configuration = own.configuration
    count = configuration.num_microbatches
    is_interleaved = configuration.virtual_pipeline > 1
    if configuration.zero_bubble:
        return None
    if is_interleaved and count % configuration.pipeline:
        return None
    pipeline = Pipeline(
        forward_s_S=own.stage_seconds("forward_s_SC"),
        backward_s_S=own.stage_seconds("backward_s_SC"),
        num_devices=configuration.pipeline,
        num_microbatches=count,
        send_s=own.seconds("boundary_s"),
    )
    if not can_be_played(pipeline):
        return None
    return play(pipeline).step_s * configuration.rounds + own.seconds("once_s")
