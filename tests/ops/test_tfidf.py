"""TfIdfVectorizer counts n-grams of integers with skips; refusals of it, and of Mod and Add."""

import numpy as np
import pytest
from harness import Case, R, V, expect_error, flat, run_case

COUNTS = dict(mode="TF", min_gram_length=1, max_gram_length=2, ngram_counts=[0, 3], ngram_indexes=[0, 1, 2, 3, 4],
              pool_int64s=[2, 3, 5, 5, 6, 2, 3])
TOKENS = [[1, 2, 3, 5, 5, 6], [2, 0, 3, 0, 2, 3]]
CASES = [
    *(flat("TfIdfVectorizer", V(TOKENS, t), attrs={**COUNTS, "max_skip_count": k}) for k in (0, 3)
      for t in (np.int32, np.int64)),
    *(flat("TfIdfVectorizer", V(TOKENS, np.int64),
           attrs={**COUNTS, "mode": m, "max_skip_count": 1, "weights": [1.0, 2, 3, 4, 5]})
      for m in ("IDF", "TFIDF")),
    flat("TfIdfVectorizer", V([], np.int64), attrs={**COUNTS, "max_skip_count": 1},
         reference=lambda x: np.zeros(5, np.float32), name="empty"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_errors():
    expect_error(Case("Mod", [R(2, dtype=np.uint64), V([1, 0], np.uint64)]), ValueError, "zero")
    expect_error(Case("Add", [R(2, 3), R(3)], opset=6), ValueError, "broadcast is 0")
    expect_error(Case("TfIdfVectorizer", [V([1], np.int64)], {**COUNTS, "pool_strings": ["a"], "max_skip_count": 0}),
                 NotImplementedError, "strings")
    expect_error(Case("TfIdfVectorizer", [V([1], np.int64)], {**COUNTS, "max_skip_count": 0, "ngram_counts": [0, 99]}),
                 ValueError, "ngram_counts")
    expect_error(Case("TfIdfVectorizer", [V([1], np.int64)],
                      {**COUNTS, "max_skip_count": 0, "ngram_indexes": [2**63 - 1, 0, 0, 0, 0]}),
                 ValueError, "ngram_indexes has the entry 9223372036854775807")  # + 1 would wrap: a column before the result
