"""libs/symbols.c: functions of a library that is opened at run time."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Symbol(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_size_t))


def test_functions_of_the_first_library_that_is_found(tmp_path):
    built = tmp_path / "library.so"
    subprocess.run(["cc", "-std=gnu11", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{ROOT}/cuda", f"-I{ROOT}/csrc",
                    str(ROOT / "cuda/libs/symbols.c"), "-o", str(built), "-ldl"], check=True)
    opener = ctypes.CDLL(str(built)).ont_library_open
    opener.restype = ctypes.c_bool
    opener.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def opened(libraries: list[bytes], names: list[bytes]) -> list[int] | None:
        table = (ctypes.c_void_p * len(names))()
        symbols = (Symbol * len(names))(*[(name, i * ctypes.sizeof(ctypes.c_void_p)) for i, name in enumerate(names)])
        found = opener((ctypes.c_char_p * len(libraries))(*libraries), len(libraries), symbols, len(names), table)
        return list(table) if found else None

    math = ctypes.CDLL("libm.so.6")
    wanted = [ctypes.cast(getattr(math, name), ctypes.c_void_p).value for name in ("cos", "exp")]
    assert opened([b"libm.so.6"], [b"cos", b"exp"]) == wanted
    assert opened([b"nowhere.so", b"libm.so.6"], [b"cos", b"exp"]) == wanted
    assert opened([b"libm.so.6"], [b"cos", b"no_such_function"]) is None
    assert opened([b"nowhere.so"], [b"cos"]) is None
