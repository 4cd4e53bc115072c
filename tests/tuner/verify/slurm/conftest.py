"""A real Slurm of two nodes."""

from collections.abc import Iterator

import pytest

from tests.tuner.slurm_cluster import Cluster, running_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes of two cores; whatever the test leaves of them is ended."""
    with running_cluster(nodes=2, down_after_s=60) as one:
        yield one
