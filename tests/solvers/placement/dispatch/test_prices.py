import numpy as np
import numpy.typing as npt
import pytest

from solvers.placement.dispatch.prices import choices, expert_prices, score_bound

Floats = npt.NDArray[np.float64]


def skewed(*, seed: int, tokens: int = 256, experts: int = 16) -> Floats:
    """Softmax scores of a router that prefers some experts."""
    rng = np.random.default_rng(seed)
    logits_TE = rng.normal(size=(tokens, experts)) + 1.1 * rng.normal(size=experts)
    weights_TE = np.exp(logits_TE)
    return np.asarray(weights_TE / weights_TE.sum(axis=1, keepdims=True))


def outcome(score_TE: Floats, sweeps: int, *, top_k: int = 4) -> tuple[float, float]:
    """The largest load over the mean, less 1, and the scores of what was chosen."""
    tokens, experts = score_TE.shape
    price_E = expert_prices(score_TE, top_k=top_k, sweeps=sweeps)
    chosen_TK = choices(score_TE, price_E, top_k=top_k)
    load_E = np.bincount(chosen_TK.ravel(), minlength=experts)
    total = float(np.take_along_axis(score_TE, chosen_TK, axis=1).sum())
    return float(load_E.max()) * experts / (top_k * tokens) - 1.0, total


def test_a_handful_of_sweeps_balances_skewed_scores_at_the_price_of_a_fifth() -> None:
    # A rerun of arXiv:2502.15451 on 256 tokens, 16 experts, top 4: the largest violation falls from
    # 2.14 to 0.06 in eight sweeps, the score by 18 % (179.9 to 146.5).
    runs = [[outcome(skewed(seed=seed), sweeps) for sweeps in (0, 1, 4, 8)] for seed in range(8)]
    violation, total = np.array(runs).mean(axis=0).T
    assert violation[0] == pytest.approx(2.14, abs=0.25)
    assert violation[3] == pytest.approx(0.06, abs=0.06)
    assert list(violation) == sorted(violation, reverse=True)
    assert total[3] / total[0] - 1.0 == pytest.approx(-0.18, abs=0.03)


@pytest.mark.parametrize("sweeps", [0, 1, 8])
def test_prices_bound_the_score_of_every_balanced_assignment(sweeps: int) -> None:
    score_TE = skewed(seed=3, tokens=64, experts=8)
    price_E = expert_prices(score_TE, top_k=2, sweeps=sweeps)
    bound = score_bound(score_TE, price_E, top_k=2)
    rng = np.random.default_rng(0)
    # 64 tokens x 2 of 8 experts: every expert has 16 places. Two shifted permutations of the tokens
    # give each its two experts and each expert its sixteen tokens.
    for _ in range(50):
        first_T = rng.permutation(np.repeat(np.arange(8), 8))
        second_T = (first_T + rng.integers(1, 8)) % 8
        rows = np.arange(64)
        total = score_TE[rows, first_T].sum() + score_TE[rows, second_T].sum()
        assert total <= bound + 1e-9


def test_scores_without_skew_need_no_prices() -> None:
    # Token t prefers experts t and t + 1: every expert is asked for twice.
    score_TE = 0.5 * np.eye(8) + 0.3 * np.roll(np.eye(8), 1, axis=1) + 0.01
    assert expert_prices(score_TE, top_k=2, sweeps=4) == pytest.approx(np.full(8, 0.0), abs=1e-12)
    violation, total = outcome(score_TE, 4, top_k=2)
    assert violation == 0.0
    assert total == pytest.approx(8 * 0.82)


@pytest.mark.parametrize(("tokens", "top_k"), [(8, 0), (8, 4), (1, 2)])
def test_what_fills_no_place_is_refused(tokens: int, top_k: int) -> None:
    with pytest.raises(ValueError, match="fill no place"):
        expert_prices(np.ones((tokens, 4)), top_k=top_k, sweeps=1)
