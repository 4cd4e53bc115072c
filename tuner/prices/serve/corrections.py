"""Factors on the predicted seconds of an engine's steps, by what takes them.

A server that runs shows how far its steps are from what was predicted of them: its GEMMs reach less
than the tables' did, its host takes longer. Each factor stands on one such part wherever it is
priced, so that other loads, layouts and models on the same device are corrected as well, and
capacity with them. They are fitted to the logs of a server (tuner/calibrate/step_corrections.py).
"""

from typing import Annotated

from pydantic import Field

from profilers.records import Record

Factor = Annotated[float, Field(gt=0.0, lt=1e3, allow_inf_nan=False)]


class StepCorrections(Record):
    """Seconds that an engine's own steps showed over those that are predicted; 1: as predicted."""

    step: Factor = 1.0
    """Factor on the host's seconds of a step, those for each sequence included."""
    linear: Factor = 1.0
    """Factor on everything that depends on a step's tokens alone: GEMMs, experts, small kernels."""
    attention: Factor = 1.0
    """Factor on attention of running sequences."""
    prompt_attention: Factor = 1.0
    """Factor on attention of prompts."""
    links: Factor = 1.0
    """Factor on collectives and on sends between stages."""
    request: Factor = 1.0
    """Factor on the seconds of a request in HTTP server, tokeniser and client."""


UNCORRECTED = StepCorrections()
