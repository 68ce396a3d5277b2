"""Loops are found in what nvdisasm prints, and the usual way through them is counted."""

from __future__ import annotations

import re

import pytest
import sass

LISTING = """
.text._Z1kv:
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R4, [R1] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/              @P0 BRA `(.L_x_1) ;
        /*0040*/                   IMAD R1, R2, R3, R4 ;
        /*0050*/                   MUFU.EX2 R1, R1 ;
        /*0060*/                   IADD3 R1, R2, R3, RZ ;
.L_x_1:
        /*0070*/                   BSSY B0, `(.L_x_3) ;
        /*0080*/             @!P1 BRA `(.L_x_2) ;
        /*0090*/                   MUFU.RCP R1, R1 ;
        /*00a0*/                   BSYNC B0 ;
.L_x_2:
        /*00b0*/                   MUFU.EX2 R1, R1 ;
        /*00c0*/                   MUFU.EX2 R1, R1 ;
        /*00c8*/                   MUFU.EX2 R1, R1 ;
.L_x_3:
        /*00d0*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*00e0*/                   STS.64 [R1], R4 ;
        /*00f0*/              @P2 BRA `(.L_x_0) ;
        /*0100*/                   EXIT ;
.L_x_4:
        /*0110*/                   BRA `(.L_x_4);
"""


def test_the_usual_way_through_a_loop_is_counted():
    (code,) = sass.kernels_of(LISTING).values()
    assert len(code.text) == 19 and sass.loops(code) == [(1, 16)]  # not the padding behind the end
    loop = sass.count(code, 64)
    assert loop == sass.Loop(scores=64, instructions=14, hmma=1, mufu=4, conversions=0, shared=6, global16=1, local=0)


def test_a_kernel_without_such_a_loop_is_an_error():
    (code,) = sass.kernels_of(LISTING.replace("HMMA", "FFMA")).values()
    with pytest.raises(ValueError, match="no loop"):
        sass.count(code, 64)


def test_the_unit_that_is_busy_longest_is_counted():
    loop = sass.Loop(1024, 400, 64, 32, 16, 100, 2, 0)
    assert sass.cycles(loop) == pytest.approx(64 / 0.63)
    assert sass.cycles(loop._replace(instructions=1000)) == 250
    assert sass.cycles(loop._replace(mufu=70)) == 140


def test_the_table_has_every_loop_and_is_read_as_it_is_written(tmp_path):
    known = sass.read_table()
    assert set(known) == set(sass.LOOPS) and all(loop.scores == sass.LOOPS[name][2] for name, loop in known.items())
    sass.write_table(known, tmp_path / "loops.tsv")
    assert sass.read_table(tmp_path / "loops.tsv") == known and not sass.worse(known, known)


def test_a_slower_loop_is_found():
    known = sass.read_table()
    name = next(iter(known))
    for worse in (known[name]._replace(instructions=2 * known[name].instructions, hmma=2 * known[name].hmma),
                  known[name]._replace(local=known[name].local + 1)):
        (found,) = sass.worse({**known, name: worse}, known)
        assert found.startswith(name)
    assert len(sass.worse({}, known)) == len(known)


def test_loops_are_those_of_the_sources():
    """Tensor-core instructions of a pass are those that the sizes of the tiles give."""
    for name, loop in sass.read_table().items():
        kernel = re.match(r"\w+", name)[0]
        products = {"flash_mma_kernel": 2, "flash_mma_dq_kernel": 3, "flash_mma_dkv_kernel": 4}[kernel]
        width = int(re.search(r"<(\d+)>", name)[1])
        assert loop.hmma == products * loop.scores * width // (16 * 8 * 16), name
