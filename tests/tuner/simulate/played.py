"""Idle seconds and held activations of every device, from the passes of a schedule."""

from tuner.simulate.pipeline import BACKWARD, FORWARD, WEIGHT, Pipeline, passes


def idle_s(pipeline: Pipeline) -> list[float]:
    """Return the seconds of the step in which each device waits."""
    every = passes(pipeline)
    end_s = max(one.end_s for one in every)
    idle = [end_s] * pipeline.num_devices
    for one in every:
        idle[one.device] -= one.end_s - one.start_s
    return idle


def most_held(pipeline: Pipeline) -> list[int]:
    """Return the most passes whose activations each device holds at once."""
    last = WEIGHT if pipeline.weight_s_S else BACKWARD
    held, most = [0] * pipeline.num_devices, [0] * pipeline.num_devices
    for one in passes(pipeline):
        held[one.device] += (one.kind == FORWARD) - (one.kind == last)
        most[one.device] = max(most[one.device], held[one.device])
    return most
