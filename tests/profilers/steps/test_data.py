"""Text: the same sequence for the same step and place in the batch, whoever asks."""

import numpy as np

from profilers.steps.data import read_corpus, sample_sequences


def test_a_sequence_does_not_depend_on_the_others() -> None:
    corpus = read_corpus()
    assert len(corpus) > 500_000

    def sample(*sequences: int, step: int = 3) -> np.ndarray:
        return sample_sequences(corpus, sequences, step=step, seed=1, length=64, vocab_size=256)

    both = sample(4, 5)
    assert both.shape == (2, 65)
    assert (both[1] == sample(5)[0]).all()
    assert (both[1] != sample(5, step=4)[0]).any()


def test_tokens_stay_inside_a_small_vocabulary_and_short_corpora_wrap() -> None:
    corpus = np.arange(200, dtype=np.uint8)
    tokens = sample_sequences(corpus, (0,), step=0, seed=0, length=199, vocab_size=16)
    assert tokens.shape == (1, 200)
    assert tokens.max() == 15
