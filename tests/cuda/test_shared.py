"""Blocks of memory that host and device see: zeroed, from few allocations, used again in the order of their return."""

from __future__ import annotations

import ctypes

BYTES, PAGE = 64, 8192


def test_blocks_come_from_few_allocations(emulated):
    library = ctypes.CDLL(str(emulated))
    library.ont_emulate_shared_take.restype = ctypes.c_void_p
    give, pages = library.ont_emulate_shared_give, library.ont_emulate_shared_pages
    before = pages()
    blocks = [library.ont_emulate_shared_take() for _ in range(PAGE // BYTES)]
    assert len(set(blocks)) == len(blocks) and pages() <= before + 1
    for block in blocks:
        assert ctypes.string_at(block, BYTES) == bytes(BYTES)
        ctypes.memset(block, 7, BYTES)
        give(ctypes.c_void_p(block))
    allocated = pages()
    again = [library.ont_emulate_shared_take() for _ in range(PAGE // BYTES)]
    assert pages() == allocated and set(again) == set(blocks)
    assert again[-1] == blocks[-1], "the block that was given back last is used last"
    assert all(ctypes.string_at(block, BYTES) == bytes(BYTES) for block in again)
    for block in again:
        give(ctypes.c_void_p(block))
