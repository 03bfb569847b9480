"""Section 20.4: the complete runnable code of Sections 20.1 to 20.3, and its checks.

    python chapter20/04_standalone_complete.py

fused_linear_gelu_kernel is Section 20.1's matmul with bias and GELU in its epilogue.
row_mean_var_kernel is Section 20.2's row-wise mean and biased variance.
layernorm_forward_kernel is Section 20.3's LayerNorm, layernorm_forward_kernel_wrong_eps its buggy
twin with eps outside the square root.
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
def fused_linear_gelu_kernel(
    a_ptr,  # (M, K) input
    b_ptr,  # (K, N) weight, read through its strides: no transposed copy is made
    bias_ptr,  # (N,) bias, contiguous, or None
    c_ptr,  # (M, N) output
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # int64, because an index times a stride passes 2**31 in a large tensor.
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1).to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(
            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
            mask=(rows[:, None] < M) & (ks[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,
            mask=(ks[:, None] < K) & (cols[None, :] < N),
            other=0.0,
        )
        # "ieee": by default an NVIDIA GPU takes TF32, with 10 bits of mantissa, for float32.
        acc += tl.dot(a, b, input_precision="ieee")

    # The epilogue: acc is still in registers, and nothing has been stored yet.
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        acc += bias[None, :]
    acc = acc * 0.5 * (1.0 + tl.erf(acc / 1.4142135623730951))  # exact GELU; sqrt(2)
    tl.store(
        c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn,
        acc,
        mask=(rows[:, None] < M) & (cols[None, :] < N),
    )


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


@triton.jit
def layernorm_forward_kernel(
    x_ptr,  # (M, N) input, its columns contiguous
    gamma_ptr,  # (N,) scale, contiguous, or None
    beta_ptr,  # (N,) shift, contiguous, or None
    out_ptr,  # (M, N) output, contiguous: its row stride is N, whatever x's is
    M,
    N,
    stride_m,
    eps,
    BLOCK_N: tl.constexpr,  # a power of two, at least N: one program holds a whole row
):
    row = tl.program_id(0).to(tl.int64)  # row * stride_m passes 2**31 in a large tensor
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + row * stride_m + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    # Lanes past the row hold 0, not the mean: without the mask each would add mean**2.
    diff = tl.where(mask, x - mean, 0.0)
    var = tl.sum(diff * diff, axis=0) / N
    inv_std = 1.0 / tl.sqrt(var + eps)
    x_norm = diff * inv_std
    if gamma_ptr is not None:
        x_norm *= tl.load(gamma_ptr + cols, mask=mask, other=0.0)
    if beta_ptr is not None:
        x_norm += tl.load(beta_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * N + cols, x_norm, mask=mask)


@triton.jit
def layernorm_forward_kernel_wrong_eps(
    x_ptr,  # (M, N) input, its columns contiguous
    gamma_ptr,  # (N,) scale, contiguous, or None
    beta_ptr,  # (N,) shift, contiguous, or None
    out_ptr,  # (M, N) output, contiguous: its row stride is N, whatever x's is
    M,
    N,
    stride_m,
    eps,
    BLOCK_N: tl.constexpr,  # a power of two, at least N: one program holds a whole row
):
    row = tl.program_id(0).to(tl.int64)  # row * stride_m passes 2**31 in a large tensor
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + row * stride_m + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / N
    # Lanes past the row hold 0, not the mean: without the mask each would add mean**2.
    diff = tl.where(mask, x - mean, 0.0)
    var = tl.sum(diff * diff, axis=0) / N
    inv_std = 1.0 / (tl.sqrt(var) + eps)  # BUG: eps outside the square root
    x_norm = diff * inv_std
    if gamma_ptr is not None:
        x_norm *= tl.load(gamma_ptr + cols, mask=mask, other=0.0)
    if beta_ptr is not None:
        x_norm += tl.load(beta_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * N + cols, x_norm, mask=mask)


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


def fused_linear_gelu(x, weight, bias, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16):
    """gelu(x @ weight.T + bias) with the exact (erf) GELU, in one kernel launch (Section 20.1).

    x is (M, K), weight (N, K) as torch.nn.Linear holds it, bias (N,) or None; all float32, on one
    device, of any strides. Returns a new (M, N) float32 tensor; no gradient flows through it.

    BLOCK_M, BLOCK_N and BLOCK_K are the sides of a tile: powers of two, at least 16 (tl.dot's
    minimum for BLOCK_K on NVIDIA GPUs, and for all three before triton 3.3; the book has 8, 8, 4).

    Raises TypeError for another dtype; ValueError for another rank, for shapes that do not chain,
    for tensors on different devices, for other tile sides and for N over 65535 * BLOCK_N.
    """
    check_float32(x=x, weight=weight, bias=bias)
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"expected x (M, K) and weight (N, K), got {shapes}")
    M, K = x.shape
    N = weight.shape[0]
    if bias is not None:
        if bias.shape != (N,):
            raise ValueError(f"expected bias ({N},), got {shapes}, bias {tuple(bias.shape)}")
        bias = bias.contiguous()
    for side in (BLOCK_M, BLOCK_N, BLOCK_K):
        if side < 16 or side & (side - 1):
            raise ValueError(
                "expected tile sides that are powers of two and at least 16, got "
                f"BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}, BLOCK_K={BLOCK_K}"
            )
    if triton.cdiv(N, BLOCK_N) > 65535:  # CUDA's limit on a grid's second axis
        raise ValueError(f"N={N} is more than 65535 tiles of BLOCK_N={BLOCK_N}: take larger ones")

    out = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; on the CPU, no effect
        fused_linear_gelu_kernel[grid](
            x,
            weight,
            bias,
            out,
            M,
            N,
            K,
            x.stride(0),
            x.stride(1),
            weight.stride(1),  # weight is (N, K): swapping its strides reads it as (K, N)
            weight.stride(0),
            out.stride(0),
            out.stride(1),
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
        )
    return out


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


def _run_layernorm(x, gamma, beta, eps, kernel):
    """LayerNorm over the last dimension, in one launch of either kernel (Section 20.3).

    x is (M, N), gamma and beta (N,) or None; all float32, on one device, of any strides; x whose
    columns are not contiguous is copied first. N is at most 2**20; a row of more than 32768 no
    longer fits the registers, and is slower. Returns a new (M, N) float32 tensor; no gradient flows
    through it.

    Raises TypeError for another dtype; ValueError for another rank, for shapes that do not match
    and for tensors on different devices.
    """
    check_float32(x=x, gamma=gamma, beta=beta)
    if x.dim() != 2:
        raise ValueError(f"expected x (M, N), got x {tuple(x.shape)}")
    M, N = x.shape
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        if parameter is not None and parameter.shape != (N,):
            raise ValueError(
                f"expected {name} ({N},), got x {tuple(x.shape)}, {name} {tuple(parameter.shape)}"
            )
    BLOCK_N = max(1, triton.next_power_of_2(N))
    if BLOCK_N > 2**20:  # Triton's limit; BLOCK_N must cover the row, or the mean is not the row's
        raise ValueError(f"expected rows of at most 2**20, got x {tuple(x.shape)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    gamma = gamma if gamma is None else gamma.contiguous()
    beta = beta if beta is None else beta.contiguous()

    out = torch.empty((M, N), device=x.device, dtype=x.dtype)
    max_warps = 16 if torch.version.hip else 32  # 1024 threads; AMD's warps have up to 64
    num_warps = min(max(BLOCK_N // 512, 1), max_warps)  # long rows need more threads
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; on the CPU, no effect
        kernel[(M,)](
            x, gamma, beta, out, M, N, x.stride(0), float(eps), BLOCK_N=BLOCK_N, num_warps=num_warps
        )
    return out


def section_20_1():
    print("=== Section 20.1: fused Linear+bias+GELU vs. a real torch.nn.Linear module ===")
    torch.manual_seed(0)
    M, K, N = 20, 12, 16
    layer = torch.nn.Linear(K, N).requires_grad_(False)
    x = torch.randn(M, K)
    oracle = torch.nn.functional.gelu(layer(x), approximate="none")
    weight, bias = layer.weight.to(DEVICE), layer.bias.to(DEVICE)
    out = fused_linear_gelu(x.to(DEVICE), weight, bias).cpu()
    print("allclose to nn.Linear + gelu oracle?", torch.allclose(out, oracle, atol=1e-4))


def section_20_2():
    print("\n=== Section 20.2: row-wise mean/variance vs. biased and unbiased oracles ===")
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


def layernorm(x, module, kernel=layernorm_forward_kernel):
    """What the kernel gives for x and a torch.nn.LayerNorm's own parameters, back on the CPU."""
    gamma, beta = module.weight.to(DEVICE), module.bias.to(DEVICE)
    return _run_layernorm(x.to(DEVICE), gamma, beta, module.eps, kernel).cpu()


def module_and_input():
    """The chapter's torch.nn.LayerNorm and its x (6, 17), on the CPU."""
    torch.manual_seed(0)
    M, N = 6, 17
    module = torch.nn.LayerNorm(N).requires_grad_(False)
    return module, torch.randn(M, N)


def module_and_rows():
    """The eps trap's torch.nn.LayerNorm, its typical rows (4, 8) and near-constant row (1, 8)."""
    torch.manual_seed(1)
    typical = torch.randn(4, 8)
    module = torch.nn.LayerNorm(8).requires_grad_(False)
    # In float32 the steps round to multiples of 4.77e-7, and the row's variance is 1.36e-12: far
    # below eps = 1e-5, so that eps decides what comes out.
    steps = torch.tensor([[1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0]])
    near_constant = 5.0 + steps * 1e-6
    return module, typical, near_constant


def section_20_3():
    print("\n=== Section 20.3: fused LayerNorm vs. a real torch.nn.LayerNorm module ===")
    module, x = module_and_input()
    out = layernorm(x, module)
    print("allclose to nn.LayerNorm?", torch.allclose(out, module(x), atol=1e-4))

    print("\n=== Section 20.3: the eps-placement trap ===")
    module, typical, near_constant = module_and_rows()
    for name, x in (("typical row", typical), ("near-constant row", near_constant)):
        correct = layernorm(x, module)
        wrong = layernorm(x, module, layernorm_forward_kernel_wrong_eps)
        print(
            f"{name}: correct allclose? {torch.allclose(correct, module(x), atol=1e-4)}  "
            f"wrong-eps allclose? {torch.allclose(wrong, module(x), atol=1e-4)}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    section_20_1()
    section_20_2()
    section_20_3()


if __name__ == "__main__":
    main()
