import numpy as np

from solvers.placement.greedy_groups import grown_groups


def test_hidden_groups_are_found() -> None:
    rng = np.random.default_rng(3)
    hidden_E = rng.permutation(np.repeat(np.arange(6), 4))
    noise_EE = rng.random((24, 24))
    group_E = grown_groups(2.0 * (hidden_E[:, None] == hidden_E) + noise_EE + noise_EE.T, 6)
    assert all(len(set(group_E[hidden_E == hidden])) == 1 for hidden in range(6))


def test_groups_of_one_and_one_group_of_all_are_formed() -> None:
    likeness_EE = np.zeros((3, 3))
    assert sorted(grown_groups(likeness_EE, 3)) == [0, 1, 2]
    assert grown_groups(likeness_EE, 1).tolist() == [0, 0, 0]
