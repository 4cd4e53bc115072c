"""TTFT of a single prompt, as its client sees it (tuner/simulate/serving/client.py)."""

import numpy as np

from tuner.costs.serve.iteration import Iteration
from tuner.search.serve.demand import Demand
from tuner.search.serve.options import step_seconds
from tuner.simulate.serving.client import engine_client


def client_ttft_s(iteration: Iteration, demand: Demand, *, read_s: float) -> float:
    """Seconds from sending a prompt to its first token, where reading it takes `read_s`."""
    step_s = float(step_seconds(iteration, np.ones(1), demand)[0])
    return read_s + engine_client(iteration).late_s(step_s)
