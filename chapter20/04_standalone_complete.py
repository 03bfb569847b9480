"""Section 20.4: complete runnable code, Sections 20.1 to 20.3 in the book's order.

    python chapter20/04_standalone_complete.py
"""

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


# 20.1 Fusing an Epilogue Into a Matmul: Linear + Bias + GELU in One Kernel
@triton.jit
def fused_linear_gelu_kernel(
        a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # a (M, K), b (K, N), bias (N,) and c (M, N) are float32. A program computes one tile of c.
    pid_m = tl.program_id(0).to(tl.int64)  # int64: index * stride passes 2**31 in a large tensor
    pid_n = tl.program_id(1).to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, K, BLOCK_K):
        ks = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
        a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak
        b_ptrs = b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn
        a_mask = (rows[:, None] < M) & (ks[None, :] < K)
        b_mask = (ks[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")  # NVIDIA's default, TF32, rounds to 10 bits

    # The epilogue: acc is still in registers, and nothing has been stored yet.
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    acc = acc + bias[None, :]
    SQRT_2_INV: tl.constexpr = 0.7071067811865476
    cdf = 0.5 * (1.0 + tl.erf(acc * SQRT_2_INV))
    result = acc * cdf
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    c_mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptrs, result, mask=c_mask)


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


def fused_linear_gelu(x, weight, bias, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16):  # tl.dot's minimum
    """gelu(x @ weight.T + bias) with the exact (erf) GELU, in one launch (Section 20.1).

    x (M, K), weight (N, K), bias (N,) and the result (M, N) are float32, without gradient. Blocks
    are powers of two. Raises ValueError for other tensors, or if N has more than 65535 blocks.
    """
    check("x", x, ("M", "K"), DEVICE)
    M, K = x.shape
    check("weight", weight, ("N", K), x.device)
    N = weight.shape[0]
    check("bias", bias, (N,), x.device)
    w_t = weight.t()  # a view: the book's copy is a second launch
    out = torch.empty((M, N), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    if min(BLOCK_M, BLOCK_N, BLOCK_K) < 1 or grid[1] > 65535:  # CUDA's limit
        raise ValueError(f"N={N} has no grid of tiles {BLOCK_M, BLOCK_N, BLOCK_K}: take others")
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        fused_linear_gelu_kernel[grid](
            x, w_t, bias.contiguous(), out, M, N, K,  # the kernel assumes stride 1 in bias
            x.stride(0), x.stride(1), w_t.stride(0), w_t.stride(1), out.stride(0), out.stride(1),
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)
    return out


@torch.no_grad()
def section_20_1():
    print("=== Section 20.1: fused Linear+bias+GELU vs. a real torch.nn.Linear module ===")
    torch.manual_seed(0)
    M, K, N = 20, 12, 16
    layer = torch.nn.Linear(K, N)
    x = torch.randn(M, K)
    oracle = torch.nn.functional.gelu(layer(x), approximate="none")
    x, layer = x.to(DEVICE), layer.to(DEVICE)  # a kernel on a GPU cannot read CPU tensors
    out = fused_linear_gelu(x, layer.weight, layer.bias).cpu()
    print("allclose to nn.Linear + gelu oracle?", torch.allclose(out, oracle, atol=1e-4))


# 20.2 Row-Wise Mean and Variance: LayerNorm's Reduction
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


def section_20_2():
    print("\n=== Section 20.2: row-wise mean/variance vs. biased and unbiased oracles ===")
    torch.manual_seed(0)
    M, N = 5, 10
    x = torch.randn(M, N)
    BLOCK_N = triton.next_power_of_2(N)
    mean, var = torch.empty(M, device=DEVICE), torch.empty(M, device=DEVICE)
    row_mean_var_kernel[(M,)](x.to(DEVICE), mean, var, M, N, x.stride(0), BLOCK_N=BLOCK_N)
    print("mean allclose to x.mean(dim=-1)?", torch.allclose(mean.cpu(), x.mean(dim=-1), atol=1e-5))
    print("var allclose to x.var(unbiased=False)?",
          torch.allclose(var.cpu(), x.var(dim=-1, unbiased=False), atol=1e-5))
    print("var allclose to x.var(unbiased=True) [WRONG comparison]?",
          torch.allclose(var.cpu(), x.var(dim=-1, unbiased=True), atol=1e-5))


# 20.3 The Complete Fused LayerNorm Kernel, and the Eps-Placement Trap
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


def _run_layernorm(x, gamma, beta, eps, kernel):
    """LayerNorm of x (M, N) with gamma (N,) and beta (N,), by either kernel (Section 20.3)."""
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
    print("\n=== Section 20.3: fused LayerNorm vs. a real torch.nn.LayerNorm module ===")
    torch.manual_seed(0)
    M, N = 6, 17
    ln = torch.nn.LayerNorm(N)
    x = torch.randn(M, N)
    oracle = ln(x)
    ln, x = ln.to(DEVICE), x.to(DEVICE)  # a kernel on a GPU cannot read CPU tensors
    out = _run_layernorm(x, ln.weight, ln.bias, ln.eps, layernorm_forward_kernel).cpu()
    print("allclose to nn.LayerNorm?", torch.allclose(out, oracle, atol=1e-4))

    print("\n=== Section 20.3: the eps-placement trap ===")
    torch.manual_seed(1)
    x_typical = torch.randn(4, 8)
    ln2 = torch.nn.LayerNorm(8)
    oracle_typical = ln2(x_typical)
    ln2, x_typical = ln2.to(DEVICE), x_typical.to(DEVICE)
    correct_typical = _run_layernorm(
        x_typical, ln2.weight, ln2.bias, ln2.eps, layernorm_forward_kernel).cpu()
    wrong_typical = _run_layernorm(
        x_typical, ln2.weight, ln2.bias, ln2.eps, layernorm_forward_kernel_wrong_eps).cpu()
    print("typical row: correct allclose?",
          torch.allclose(correct_typical, oracle_typical, atol=1e-4),
          " wrong-eps allclose?", torch.allclose(wrong_typical, oracle_typical, atol=1e-4))

    # The variance of this row, 1.36e-12, is far below eps: here eps decides the result.
    x_flat = 5.0 + 1e-6 * torch.tensor([[1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0]])
    ln3 = torch.nn.LayerNorm(8)
    oracle_flat = ln3(x_flat)
    ln3, x_flat = ln3.to(DEVICE), x_flat.to(DEVICE)
    correct_flat = _run_layernorm(
        x_flat, ln3.weight, ln3.bias, ln3.eps, layernorm_forward_kernel).cpu()
    wrong_flat = _run_layernorm(
        x_flat, ln3.weight, ln3.bias, ln3.eps, layernorm_forward_kernel_wrong_eps).cpu()
    print("near-constant row: correct allclose?",
          torch.allclose(correct_flat, oracle_flat, atol=1e-4),
          " wrong-eps allclose?", torch.allclose(wrong_flat, oracle_flat, atol=1e-4))


if __name__ == "__main__":
    if "__file__" in globals() and sys.argv[1:]:  # pasted into a notebook, there is no __file__
        sys.exit(f"04_standalone_complete.py takes no arguments, got {sys.argv[1:]}")
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    section_20_1()
    section_20_2()
    section_20_3()
