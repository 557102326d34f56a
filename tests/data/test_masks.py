"""Choice of the masked tokens of a text."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.text.masks import choose_masks

MASK = 99


@given(
    allowed=st.lists(st.booleans(), min_size=1, max_size=40),
    share=st.floats(0.05, 1),
    most=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_only_allowed_tokens_are_chosen_and_only_chosen_ones_change(allowed, share, most, seed):
    tokens = np.arange(len(allowed))
    hidden, chosen = choose_masks(
        tokens,
        np.array(allowed),
        ordinary=np.array([50]),
        mask=MASK,
        share=share,
        most=most,
        generator=np.random.default_rng(seed),
    )
    assert len(chosen) == min(most, max(1, round(sum(allowed) * share)), sum(allowed))
    assert len(set(chosen.tolist())) == len(chosen) and sorted(chosen) == chosen.tolist()
    assert all(allowed[place] for place in chosen)
    others = np.delete(np.arange(len(tokens)), chosen)
    assert (hidden[others] == tokens[others]).all()
    assert all(new in (MASK, 50, old) for new, old in zip(hidden[chosen], tokens[chosen], strict=True))
    assert tokens.tolist() == list(range(len(allowed))), "the input is not changed"
