"""Section 20.2: row-wise mean and variance, LayerNorm's reduction.

    python chapter20/02_row_mean_var.py [--worked-examples]

row_mean_var_kernel computes the mean and the biased variance of each row, as LayerNorm needs them.
The trap is in the comparison: x.var() divides by N - 1 unless it is told unbiased=False.
"""

import argparse
import os
import sys

try:
    import numpy  # noqa: F401 (Triton's interpreter needs it)
    import torch
    # Without a GPU, Triton interprets the kernels. It reads this variable when it is imported.
    INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    INTERPRET = INTERPRET or not torch.cuda.is_available()
    os.environ["TRITON_INTERPRET"] = "1" if INTERPRET else "0"
    DEVICE = "cpu" if INTERPRET else "cuda"  # device of the kernels; the oracles stay on the CPU
    import triton
    import triton.language as tl
    if INTERPRET == isinstance(tl.cdiv, triton.JITFunction):
        raise ImportError("import this before triton: GPU or interpreter is chosen only once")
except ModuleNotFoundError as error:
    sys.exit(f"{error}: ./run_all.sh finds a Python that has it, or makes one, .venv/bin/python")


@triton.jit
def row_mean_var_kernel(x_ptr, mean_ptr, var_ptr, M, N, stride_m, BLOCK_N: tl.constexpr):
    # x (M, N), mean (M,) and var (M,) are float32. A program computes one row.
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride_m passes 2**31 in a large tensor
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    row_ptr = x_ptr + row * stride_m
    x = tl.load(row_ptr + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    # Past the row, x is 0: without the mask, each position there would add mean**2 to the sum.
    diff = tl.where(mask, x - mean, 0.0)
    var = tl.sum(diff * diff, axis=0) / N  # biased: over N, as in LayerNorm, not over N - 1
    tl.store(mean_ptr + row, mean)
    tl.store(var_ptr + row, var)


def check(name, tensor, shape, device):
    """Raise ValueError unless tensor is dense float32 of this shape ("M": any size) on device."""
    got = type(tensor)
    if isinstance(tensor, torch.Tensor):
        layout = "a negated view" if tensor.is_neg() else tensor.layout
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, {layout}"
        same_device = tensor.device == device or tensor.device.type == device
        sizes = [n if isinstance(n, int) else s for n, s in zip(shape, tensor.shape, strict=False)]
        if (tensor.dtype == torch.float32 and layout == torch.strided and same_device
                and tensor.dim() == len(shape) and list(tensor.shape) == sizes):
            return
    raise ValueError(f"{name} must be dense float32 {shape} on {device}, not {got}")


def row_mean_var(x, BLOCK_N=None):
    """Mean and biased variance of each row of x, in one launch (Section 20.2).

    x (M, N) is float32; if its columns are strided, it is copied first. Returns mean (M,) and
    var (M,), float32; no gradient flows through them. BLOCK_N is a power of two from N to 2**20,
    by default the smallest. Raises ValueError for another x, and unless 0 < N <= BLOCK_N <= 2**20.
    """
    check("x", x, ("M", "N"), DEVICE)
    M, N = x.shape
    if BLOCK_N is None:
        BLOCK_N = triton.next_power_of_2(N)
    if not 0 < N <= BLOCK_N <= 2**20:  # Triton's limit
        raise ValueError(f"expected 0 < N <= BLOCK_N <= 2**20, got N={N}, BLOCK_N={BLOCK_N}")
    x = x if x.stride(1) == 1 else x.contiguous()  # the kernel reads x with stride 1
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    var = torch.empty(M, device=x.device, dtype=torch.float32)
    num_warps = min(max(BLOCK_N // 512, 1), 16 if torch.version.hip else 32)  # long rows need more
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        row_mean_var_kernel[(M,)](
            x, mean, var, M, N, x.stride(0), BLOCK_N=BLOCK_N, num_warps=num_warps)
    return mean, var


def section_20_2():
    print("=== Section 20.2: row-wise mean/variance vs. x.mean()/x.var() ===")
    torch.manual_seed(0)
    M, N = 5, 10
    x = torch.randn(M, N)
    mean, var = row_mean_var(x.to(DEVICE))  # a kernel on a GPU cannot read CPU tensors
    mean, var = mean.cpu(), var.cpu()
    oracle_mean = x.mean(dim=-1)
    oracle_var_biased = x.var(dim=-1, unbiased=False)
    oracle_var_unbiased = x.var(dim=-1, unbiased=True)
    print("mean allclose to x.mean(dim=-1)?", torch.allclose(mean, oracle_mean, atol=1e-5))
    print("var allclose to x.var(unbiased=False)?",
          torch.allclose(var, oracle_var_biased, atol=1e-5))
    print("var allclose to x.var(unbiased=True) [WRONG comparison]?",
          torch.allclose(var, oracle_var_unbiased, atol=1e-5))
    # For worked_examples:
    return mean, var, oracle_mean, oracle_var_biased, oracle_var_unbiased


def worked_examples(mean, var, oracle_mean, oracle_var_biased, oracle_var_unbiased):
    print("\n=== Worked Example 20.2.1 ===")
    print("mean allclose to x.mean(dim=-1)?", torch.allclose(mean, oracle_mean, atol=1e-5))
    print("var allclose to x.var(unbiased=False)?",
          torch.allclose(var, oracle_var_biased, atol=1e-5))
    print("var allclose to x.var(unbiased=True) [WRONG comparison]?",
          torch.allclose(var, oracle_var_unbiased, atol=1e-5))
    print("max abs diff vs unbiased:", (var - oracle_var_unbiased).abs().max().item())
    print("\nkernel's own var values:   ", var)
    print("biased (/N) oracle values: ", oracle_var_biased)
    print("unbiased (/(N-1)) oracle: ", oracle_var_unbiased)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worked-examples", action="store_true", help="print the examples too")
    # Pasted into a notebook there is no __file__, and sys.argv is not for this script.
    arguments = parser.parse_args(sys.argv[1:] if "__file__" in globals() else [])
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    results = section_20_2()
    if arguments.worked_examples:
        worked_examples(*results)
