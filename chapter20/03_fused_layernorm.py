"""Section 20.3: the complete fused LayerNorm kernel, and the eps-placement trap.

    python chapter20/03_fused_layernorm.py [--worked-examples]

layernorm_forward_kernel reads a row once, normalizes it and writes it once. Its buggy twin adds
eps outside the square root. Typical rows do not show it; near-constant rows come out too large.
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
def layernorm_forward_kernel(
        x_ptr, gamma_ptr, beta_ptr, out_ptr, M, N, stride_m, eps, BLOCK_N: tl.constexpr):
    # x (M, N), gamma (N,), beta (N,) and out (M, N) are float32. A program computes one row.
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride_m passes 2**31 in a large tensor
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    row_ptr = x_ptr + row * stride_m
    x = tl.load(row_ptr + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    # Past the row, x is 0: without the mask, each position there would add mean**2 to the sum.
    diff = tl.where(mask, x - mean, 0.0)
    var = tl.sum(diff * diff, axis=0) / N
    inv_std = 1.0 / tl.sqrt(var + eps)
    x_norm = diff * inv_std
    gamma = tl.load(gamma_ptr + cols, mask=mask, other=1.0)
    beta = tl.load(beta_ptr + cols, mask=mask, other=0.0)
    y = x_norm * gamma + beta
    out_row_ptr = out_ptr + row * N  # not stride_m: the rows of out are N apart
    tl.store(out_row_ptr + cols, y, mask=mask)


@triton.jit
def layernorm_forward_kernel_wrong_eps(
        x_ptr, gamma_ptr, beta_ptr, out_ptr, M, N, stride_m, eps, BLOCK_N: tl.constexpr):
    # x (M, N), gamma (N,), beta (N,) and out (M, N) are float32. A program computes one row.
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride_m passes 2**31 in a large tensor
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    row_ptr = x_ptr + row * stride_m
    x = tl.load(row_ptr + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    # Past the row, x is 0: without the mask, each position there would add mean**2 to the sum.
    diff = tl.where(mask, x - mean, 0.0)
    var = tl.sum(diff * diff, axis=0) / N
    inv_std = 1.0 / (tl.sqrt(var) + eps)  # BUG: eps is outside the square root
    x_norm = diff * inv_std
    gamma = tl.load(gamma_ptr + cols, mask=mask, other=1.0)
    beta = tl.load(beta_ptr + cols, mask=mask, other=0.0)
    y = x_norm * gamma + beta
    out_row_ptr = out_ptr + row * N  # not stride_m: the rows of out are N apart
    tl.store(out_row_ptr + cols, y, mask=mask)


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


def triton_layernorm(x, gamma, beta, eps=1e-5, kernel=layernorm_forward_kernel):
    """LayerNorm over the last dimension of x, in one launch (Section 20.3).

    x (M, N), gamma (N,), beta (N,) and the result (M, N) are float32; what is strided along a row
    is copied first. No gradient flows through it. Rows of over 16384 values spill from registers.
    Raises ValueError for other tensors, for N = 0 and for N over 2**20.
    """
    check("x", x, ("M", "N"), DEVICE)
    M, N = x.shape
    check("gamma", gamma, (N,), x.device)
    check("beta", beta, (N,), x.device)
    BLOCK_N = triton.next_power_of_2(N)
    if not 0 < N <= 2**20:  # Triton's limit
        raise ValueError(f"expected rows of 1 to 2**20 values, got x {tuple(x.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()  # it reads x, gamma, beta with stride 1
    out = torch.empty((M, N), device=x.device, dtype=torch.float32)
    num_warps = min(max(BLOCK_N // 512, 1), 16 if torch.version.hip else 32)  # long rows need more
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        kernel[(M,)](
            x, gamma.contiguous(), beta.contiguous(), out, M, N, x.stride(0), float(eps),
            BLOCK_N=BLOCK_N, num_warps=num_warps)
    return out


@torch.no_grad()
def section_20_3():
    print("=== Section 20.3: fused LayerNorm vs. a real torch.nn.LayerNorm module ===")
    torch.manual_seed(0)
    M, N = 6, 17
    ln = torch.nn.LayerNorm(N)
    x = torch.randn(M, N)
    oracle = ln(x)
    ln, x = ln.to(DEVICE), x.to(DEVICE)  # a kernel on a GPU cannot read CPU tensors
    out = triton_layernorm(x, ln.weight, ln.bias, ln.eps).cpu()
    print("allclose to nn.LayerNorm?", torch.allclose(out, oracle, atol=1e-4))

    print("\n=== Section 20.3: the eps-placement trap ===")
    torch.manual_seed(1)
    x_typical = torch.randn(4, 8)
    ln2 = torch.nn.LayerNorm(8)
    oracle_typical = ln2(x_typical)
    ln2, x_typical = ln2.to(DEVICE), x_typical.to(DEVICE)
    correct_typical = triton_layernorm(x_typical, ln2.weight, ln2.bias, ln2.eps).cpu()
    wrong_typical = triton_layernorm(
        x_typical, ln2.weight, ln2.bias, ln2.eps, kernel=layernorm_forward_kernel_wrong_eps).cpu()
    print("typical row: correct allclose?",
          torch.allclose(correct_typical, oracle_typical, atol=1e-4),
          " wrong-eps allclose?", torch.allclose(wrong_typical, oracle_typical, atol=1e-4))

    # The variance of this row, 1.36e-12, is far below eps: here eps decides the result.
    x_flat = 5.0 + 1e-6 * torch.tensor([[1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0]])
    ln3 = torch.nn.LayerNorm(8)
    oracle_flat = ln3(x_flat)
    ln3, x_flat = ln3.to(DEVICE), x_flat.to(DEVICE)
    correct_flat = triton_layernorm(x_flat, ln3.weight, ln3.bias, ln3.eps).cpu()
    wrong_flat = triton_layernorm(
        x_flat, ln3.weight, ln3.bias, ln3.eps, kernel=layernorm_forward_kernel_wrong_eps).cpu()
    print("near-constant row: correct allclose?",
          torch.allclose(correct_flat, oracle_flat, atol=1e-4),
          " wrong-eps allclose?", torch.allclose(wrong_flat, oracle_flat, atol=1e-4))
    # For worked_examples:
    return ((oracle, out), (oracle_typical, correct_typical, wrong_typical),
            (oracle_flat, correct_flat, wrong_flat))


def worked_examples(fused, typical, flat):
    oracle, out = fused
    oracle_typical, correct_typical, wrong_typical = typical
    oracle_flat, correct_flat, wrong_flat = flat

    print("\n=== Worked Example 20.3.1 ===")
    print("allclose to nn.LayerNorm?", torch.allclose(out, oracle, atol=1e-4))
    print("max abs diff:", (out - oracle).abs().max().item())

    print("\n=== Worked Example 20.3.2 ===")
    print("typical row: correct allclose?",
          torch.allclose(correct_typical, oracle_typical, atol=1e-4),
          " wrong-eps allclose?", torch.allclose(wrong_typical, oracle_typical, atol=1e-4),
          " max diff (wrong):", (wrong_typical - oracle_typical).abs().max().item())
    print("near-constant row: correct allclose?",
          torch.allclose(correct_flat, oracle_flat, atol=1e-4),
          " wrong-eps allclose?", torch.allclose(wrong_flat, oracle_flat, atol=1e-4))
    max_diff = (wrong_flat - oracle_flat).abs().max().item()
    print("near-constant row max diff (wrong-eps vs oracle):", max_diff)
    print("\noracle_flat:", oracle_flat)
    print("wrong_flat: ", wrong_flat)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worked-examples", action="store_true", help="print the examples too")
    # Pasted into a notebook there is no __file__, and sys.argv is not for this script.
    arguments = parser.parse_args(sys.argv[1:] if "__file__" in globals() else [])
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    results = section_20_3()
    if arguments.worked_examples:
        worked_examples(*results)
