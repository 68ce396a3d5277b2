"""GFLOP/s of each GEMM provider over the shapes of the sample, the MLP and GPT-2: python tests/bench/gemm.py"""

from onnxtrain import _C

# name, trans_a, trans_b, M, N, K
SHAPES = [
    ("sample qkv", False, True, 700, 600, 200),
    ("sample projection", False, True, 700, 200, 200),
    ("sample decoder", False, True, 700, 28782, 200),
    ("sample decoder, input gradient", False, False, 700, 200, 28782),
    ("sample decoder, weight gradient", True, False, 28782, 200, 700),
    ("MLP first", False, True, 64, 500, 784),
    ("GPT-2 up", False, True, 256, 3072, 768),
    ("GPT-2 down", False, True, 256, 768, 3072),
    ("square", False, False, 1024, 1024, 1024),
]


def main() -> None:
    providers = [name for name in _C.build_info()["gemm"] if name != "plain"]
    print(f"{'shape':<34}{'M':>7}{'N':>7}{'K':>7}" + "".join(f"{name:>10}" for name in providers) + "   GFLOP/s")
    for name, ta, tb, m, n, k in SHAPES:
        rates = [2e-9 * m * n * k / _C.measure_gemm(provider, ta, tb, m, n, k) for provider in providers]
        print(f"{name:<34}{m:>7}{n:>7}{k:>7}" + "".join(f"{rate:>10.0f}" for rate in rates))


if __name__ == "__main__":
    main()
