"""Einsum by expansion against torch.einsum: contractions, diagonals, ellipses, broadcast dims;
integer matrix products.
"""


import numpy as np
import pytest
import torch
from harness import Case, R, expect_error, run_case

EQUATIONS = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij,jk", [(2, 3), (3, 4)]),
    ("ij->ji", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("ij->i", [(2, 3)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("iji->ji", [(3, 2, 3)]),
    ("iii->i", [(3, 3, 3)]),
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    ("bhqd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 3, 5)]),
    ("i,j->ij", [(2,), (3,)]),
    ("i,i->", [(4,), (4,)]),
    ("i,i->i", [(4,), (4,)]),
    ("ij,kl->", [(2, 3), (4, 2)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 2)]),
    ("...ij->...ji", [(2, 3, 4)]),
    ("i...->...", [(2, 3, 4)]),
    ("...,...->...", [(2, 3), (3,)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("ijk,ilm,njm,nlk,abc->", [(2, 3, 4), (2, 5, 2), (2, 3, 2), (2, 5, 4), (2, 1, 3)]),
    ("bi,oij,bj->bo", [(2, 3), (4, 3, 5), (2, 5)]),
    (" i j , j k -> i k ", [(2, 3), (3, 4)]),
    ("ba,b", [(2, 3), (2,)]),
    ("ij,jk->ik", [(2, 0), (0, 4)]),
    (",->", [(), ()]),
    ("ij,ij,ij->ij", [(2, 3), (1, 3), (2, 1)]),
    ("ij,ij,ij->j", [(1, 3), (1, 3), (2, 3)]),
]
CASES = [Case("Einsum", [R(*s) for s in shapes], {"equation": e}, torch=lambda *x, e=e: torch.einsum(e, *x),
              reference=lambda *x, e=e: np.asarray(np.einsum(e, *x), x[0].dtype)) for e, shapes in EQUATIONS]
CASES += [
    Case("Einsum", [R(2, 3, dtype=np.int32, low=-9, high=9), R(3, 2, dtype=np.int32, low=-9, high=9)],
         {"equation": "ij,jk->ki"}, grad=False),
    *(Case("MatMul", [R(2, 3, 4, dtype=t, low=0, high=99), R(4, 5, dtype=t, low=0, high=99)], grad=False)
      for t in (np.int32, np.int64, np.uint32, np.uint64)),
    Case("Gemm", [R(4, 3, dtype=np.int32, low=-9, high=9), R(4, 2, dtype=np.int32, low=-9, high=9),
                  R(1, 2, dtype=np.int32, low=-9, high=9)],
         {"transA": 1, "alpha": 2.0, "beta": 3.0}, grad=False, reference=lambda a, b, c: 2 * a.T @ b + 3 * c),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


@pytest.mark.parametrize("equation, match", [
    ("ij,jk->iz", "names 'z' alone"), ("ij,jk->ii", "twice"), ("ij->i", "operands"), ("ij,jk,k->i", "unexpected"),
    ("i,jk->i", "rank"), ("i!,jk->i", "unexpected '!"), ("ji,jk->ik", "expected"), ("ij,jk->ik->", "unexpected"),
])
def test_errors(equation, match):
    expect_error(Case("Einsum", [R(2, 3), R(3, 4)], {"equation": equation}), ValueError, match)
