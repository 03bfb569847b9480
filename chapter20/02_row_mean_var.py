"""Section 20.2: row-wise mean and variance, LayerNorm's reduction.

    python chapter20/02_row_mean_var.py
    python chapter20/02_row_mean_var.py --worked-examples

row_mean_var_kernel gives each row to one program, which reads it once and computes its mean, then
the mean of its squared deviations: the biased variance (over N), which is LayerNorm's.

The trap is in the comparison: x.var() divides by N - 1 unless told unbiased=False, and a correct
kernel fails against it.
"""

import argparse
import os
import sys

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"{error}: ./run_all.sh finds a Python that has it, or makes one, .venv/bin/python")

# Triton looks at TRITON_INTERPRET as it is imported: without a GPU, switch its interpreter on.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
INTERPRET = INTERPRET or not torch.cuda.is_available()
os.environ["TRITON_INTERPRET"] = "1" if INTERPRET else "0"
DEVICE = "cpu" if INTERPRET else "cuda"  # the kernels'; inputs and oracles stay on the CPU

import triton
import triton.language as tl


@triton.jit
def row_mean_var_kernel(
    x_ptr,  # (M, N) input, its columns contiguous
    mean_ptr,  # (M,) mean of each row
    var_ptr,  # (M,) biased variance of each row
    M,
    N,
    stride_m,
    BLOCK_N: tl.constexpr,  # a power of two, at least N: one program holds a whole row
):
    row = tl.program_id(0).to(tl.int64)  # row * stride_m passes 2**31 in a large tensor
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + row * stride_m + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    # Lanes past the row hold 0, not the mean: without the mask each would add mean**2.
    diff = tl.where(mask, x - mean, 0.0)
    var = tl.sum(diff * diff, axis=0) / N  # biased: over N, as LayerNorm has it, not N - 1
    tl.store(mean_ptr + row, mean)
    tl.store(var_ptr + row, var)


def check_float32(**tensors):
    """Check that the tensors are what the kernels take: float32, dense, and on one device, theirs.

    All but x and weight may be None. Raises TypeError or ValueError, naming what each is.
    """
    required = ("x", "weight")
    tensors = {name: t for name, t in tensors.items() if t is not None or name in required}
    if any(describe(t) != "torch.float32" for t in tensors.values()):
        found = ", ".join(f"{name} {describe(t)}" for name, t in tensors.items())
        raise TypeError(f"expected float32 tensors, got {found}")
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1 or devices.pop().type != DEVICE:
        found = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise ValueError(f"expected tensors on one {DEVICE} device, got {found}")


def describe(tensor):
    """A tensor's dtype, and its layout where its memory does not hold its values one by one."""
    if not isinstance(tensor, torch.Tensor):
        return str(type(tensor))
    if tensor.layout != torch.strided:
        return f"{tensor.dtype} ({tensor.layout})"
    return f"{tensor.dtype} (a view that negates)" if tensor.is_neg() else str(tensor.dtype)


def row_mean_var(x, BLOCK_N=None):
    """Mean and biased variance of each row, in one kernel launch (Section 20.2).

    x is (M, N) float32, of any strides; x whose columns are not contiguous is copied first.
    BLOCK_N is a power of two from N to 2**20, by default the smallest. Returns (mean, var), two
    new (M,) float32 tensors, both NaN where N = 0, as torch's are; no gradient flows through them.

    Raises TypeError for another dtype; ValueError for another rank, for a tensor on another kind
    of device, and for a BLOCK_N that is shorter than the row, too long or no power of two.
    """
    check_float32(x=x)
    if x.dim() != 2:
        raise ValueError(f"expected x (M, N), got x {tuple(x.shape)}")
    M, N = x.shape
    if BLOCK_N is None:
        BLOCK_N = max(1, triton.next_power_of_2(N))
    if BLOCK_N < max(1, N) or BLOCK_N & (BLOCK_N - 1) or BLOCK_N > 2**20:  # 2**20: Triton's limit
        raise ValueError(
            f"expected BLOCK_N a power of two from N={N} to 2**20, got x {tuple(x.shape)}, "
            f"BLOCK_N={BLOCK_N}"
        )
    if x.stride(1) != 1:
        x = x.contiguous()

    mean = torch.empty(M, device=x.device, dtype=x.dtype)
    var = torch.empty_like(mean)
    max_warps = 16 if torch.version.hip else 32  # 1024 threads; AMD's warps have up to 64
    num_warps = min(max(BLOCK_N // 512, 1), max_warps)  # long rows need more threads
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; on the CPU, no effect
        row_mean_var_kernel[(M,)](
            x, mean, var, M, N, x.stride(0), BLOCK_N=BLOCK_N, num_warps=num_warps
        )
    return mean, var


def compare():
    """Print the section's three verdicts; returns the kernel's and both oracles' variances."""
    torch.manual_seed(0)
    M, N = 5, 10
    x = torch.randn(M, N)
    mean, var = (stat.cpu() for stat in row_mean_var(x.to(DEVICE)))
    biased = x.var(dim=-1, unbiased=False)
    unbiased = x.var(dim=-1, unbiased=True)
    print("mean allclose to x.mean(dim=-1)?", torch.allclose(mean, x.mean(dim=-1), atol=1e-5))
    print("var allclose to x.var(unbiased=False)?", torch.allclose(var, biased, atol=1e-5))
    wrong = torch.allclose(var, unbiased, atol=1e-5)
    print("var allclose to x.var(unbiased=True) [WRONG comparison]?", wrong)
    return var, biased, unbiased


def section_20_2():
    print("=== Section 20.2: row-wise mean/variance vs. x.mean()/x.var() ===")
    compare()


def worked_examples():
    print("\n=== Worked Example 20.2.1 ===")
    var, biased, unbiased = compare()
    print("max abs diff vs unbiased:", (var - unbiased).abs().max().item())
    print("\nkernel's own var values:   ", var)
    print("biased (/N) oracle values: ", biased)
    print("unbiased (/(N-1)) oracle: ", unbiased)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worked-examples", action="store_true", help="then print what the worked examples print"
    )
    args = parser.parse_args()
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    section_20_2()
    if args.worked_examples:
        worked_examples()


if __name__ == "__main__":
    main()
