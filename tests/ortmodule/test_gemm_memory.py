"""Libraries that are measured and not used keep no buffers."""

import subprocess
import sys
from pathlib import Path

from onnxtrain import _C

# Measures products by every library, after small ones by which it loads what it needs; prints MiB that stay resident.
MEASURE = """
import resource
import sys
import torch
from pathlib import Path
from onnxtrain import _C

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

torch.set_num_threads(2)
libraries = [name for name in sys.argv[1:] if _C.measure_gemm(name, False, False, 64, 64, 64) is not None]
before = resident()
for library in libraries:
    for shape in ((False, True, 1024, 2048, 512), (False, False, 1024, 512, 2048), (False, True, 1024, 3815, 512)):
        assert _C.measure_gemm(library, *shape) is not None
print(resident() - before)
"""


def test_measurements_leave_no_buffers():
    libraries = [name for name in _C.build_info()["gemm"] if name != "reference"]
    got = subprocess.run([sys.executable, "-c", MEASURE, "per_thread", *libraries], capture_output=True, text=True)
    assert got.returncode == 0, got.stderr
    if "libasan" not in Path("/proc/self/maps").read_text():  # that one keeps what is freed
        assert float(got.stdout) < 10, got.stdout
