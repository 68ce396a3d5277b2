"""`python -m onnxtrain`: what this build and this machine have, and how to get what is missing."""

from __future__ import annotations

import torch

from onnxtrain import _C


def main() -> None:
    info = _C.build_info()
    providers = [name for name in info["gemm"] if name != "plain"]
    rows = [
        ("onnxtrain", f"{info['version']}, {info['operators']} operator descriptors"),
        ("torch", torch.__version__),
        ("tensor exchange", "DLPack C table" if info["dlpack_exchange"] else "DLPack Python protocol (torch >= 2.10 has the C table)"),
        ("instruction set", f"{info['isa']} (ONNXTRAIN_ISA chooses plain, avx2 or avx512)"),
        ("threads", f"{info['threads']} (torch.set_num_threads)"),
        ("GEMM", ", ".join(providers) or "plain loops only: import torch first, and install the wheel with its _libs"),
        ("convolution", "unrolled windows over GEMM"),
        ("CUDA, cuDNN, NCCL", "not in this build"),
        ("MPI", "not in this build"),
    ]
    for name, text in rows:
        print(f"{name:<18} {text}")


if __name__ == "__main__":
    main()
