"""Step time by simulating the pipeline schedule pass by pass, to check the closed form.

Not covered: zero-bubble schedules, interleaving in groups other than the pipeline's ranks.
"""

from tuner.estimate.prices import PricedConfiguration
from tuner.simulate.pipeline import Pipeline, can_simulate, simulate_step


def simulated_step_s(priced: PricedConfiguration) -> float | None:
    """Return the seconds of one step, None where the schedule cannot be simulated."""
    configuration = priced.configuration
    count = configuration.num_microbatches
    is_interleaved = configuration.virtual_pipeline > 1
    if configuration.zero_bubble:
        return None
    if is_interleaved and count % configuration.pipeline:
        return None
    pipeline = Pipeline(
        forward_s_S=priced.stage_seconds("forward_s_SC"),
        backward_s_S=priced.stage_seconds("backward_s_SC"),
        num_devices=configuration.pipeline,
        num_microbatches=count,
        send_s=priced.seconds("boundary_s"),
    )
    if not can_simulate(pipeline):
        return None
    return simulate_step(pipeline).step_s * configuration.rounds + priced.seconds("once_s")
