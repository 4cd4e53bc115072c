"""How far loads of other passes scatter, told from passes alone."""

import numpy as np

from tuner.search.place.evidence import load_scatter, load_variance

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


def test_what_passes_differ_by_together_is_kept_and_adds_up_to_the_variance() -> None:
    rng = np.random.default_rng(3)
    share_E = np.full(16, 1.0 / 16)
    # The first four experts rise together and the others fall, pass by pass.
    rise_P = 0.2 * rng.standard_normal(48)
    lift_PE = 1.0 + rise_P[:, None] * np.where(np.arange(16) < 4, 1.0, -1.0 / 3.0)
    passes_PLE = np.stack([rng.multinomial(COPIES, share_E * lift_E) for lift_E in lift_PE])[
        :, None
    ]
    variance_LE = load_variance(passes_PLE, holdout_copies=np.array([COPIES * 48]), size=COPIES)
    scatter_BLE = load_scatter(passes_PLE, variance_LE=variance_LE)
    assert scatter_BLE is not None
    assert np.isclose(np.square(scatter_BLE).sum(), variance_LE.sum())
    covariance_EE = np.einsum("be,bf->ef", scatter_BLE[:, 0], scatter_BLE[:, 0])
    assert covariance_EE[:4, :4].min() > 0.0 > covariance_EE[:4, 4:].max()
    assert load_scatter(passes_PLE[:15], variance_LE=variance_LE) is None
