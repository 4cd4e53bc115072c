"""How far loads of other passes scatter, told from passes alone."""

import numpy as np

from tuner.search.place.evidence import load_variance

COPIES = 20_000


def test_the_variance_is_that_of_other_passes_for_correlated_texts() -> None:
    rng = np.random.default_rng(2)
    share_E = rng.dirichlet(np.full(64, 1.0))
    missed = []
    for dispersion in (1.0, 8.0):
        # A Dirichlet multinomial: (dispersion - 1) * concentration is next to the copies.
        shares = (
            np.tile(share_E, (400, 1))
            if dispersion == 1.0
            else rng.dirichlet(share_E * COPIES / (dispersion - 1.0), size=400)
        )
        passes_PE = np.array([rng.multinomial(COPIES, one_E) for one_E in shares])
        ratios = []
        for first in range(0, 400, 40):
            fit_PE, holdout_PE = (
                passes_PE[first : first + 20],
                passes_PE[first + 20 : first + 40],
            )
            predicted_E = load_variance(
                fit_PE[:, None], holdout_copies=np.array([holdout_PE.sum()]), size=COPIES
            )[0]
            change_E = holdout_PE.mean(axis=0) - fit_PE.mean(axis=0)
            ratios.append(np.square(change_E).sum() / predicted_E.sum())
        if not 0.75 < np.mean(ratios) < 1.35:
            missed.append((dispersion, np.mean(ratios)))
    assert not missed


def test_one_pass_has_what_counting_leaves() -> None:
    counts_LE = np.array([[30, 70]])
    predicted_LE = load_variance(counts_LE[None], holdout_copies=np.array([100]), size=100.0)
    # A share of 0.3 of 100 copies, twice: planned from and evaluated on.
    assert np.allclose(predicted_LE, [[60.0, 140.0]])
