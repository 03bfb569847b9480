"""Section 20.1: fusing an epilogue into a matmul, linear + bias + GELU in one kernel.

    python chapter20/01_fused_linear_gelu.py [--worked-examples]

fused_linear_gelu_kernel computes gelu(a @ b + bias) and writes the result once. Its buggy twin
adds the bias along the wrong axis and reads past the bias's end.
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


@triton.jit
def fused_linear_gelu_kernel_buggy_bias_axis(
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
    bias = tl.load(bias_ptr + rows, mask=rows < M, other=0.0)  # BUG: bias has N elements, not M
    acc = acc + bias[:, None]  # BUG: the bias belongs to the columns, not to the rows
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


def fused_linear_gelu(
        x, weight, bias, kernel=fused_linear_gelu_kernel,
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16):  # tl.dot's minimum on a GPU
    """gelu(x @ weight.T + bias) with the exact (erf) GELU, in one launch (Section 20.1).

    x (M, K), weight (N, K), bias (N,) and the result (M, N) are float32; a strided bias is copied
    first. No gradient flows through it. Blocks are powers of two, on a GPU at least 16. Raises
    ValueError for other tensors, or if N has more than 65535 blocks.
    """
    check("x", x, ("M", "K"), DEVICE)
    M, K = x.shape
    check("weight", weight, ("N", K), x.device)
    N = weight.shape[0]
    check("bias", bias, (N,), x.device)
    w_t = weight.t()  # a view: the book's copy is a second launch
    if kernel is fused_linear_gelu_kernel_buggy_bias_axis:
        bias = torch.nn.functional.pad(bias, (0, M))[:N]  # zeros for it to read past the end
    out = torch.empty((M, N), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    if min(BLOCK_M, BLOCK_N, BLOCK_K) < 1 or grid[1] > 65535:  # CUDA's limit
        raise ValueError(f"N={N} has no grid of tiles {BLOCK_M, BLOCK_N, BLOCK_K}: take others")
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        kernel[grid](
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

    print("\n=== Section 20.1: the bias-axis bug ===")
    out_buggy = fused_linear_gelu(
        x, layer.weight, layer.bias, kernel=fused_linear_gelu_kernel_buggy_bias_axis).cpu()
    print("buggy kernel allclose to oracle?", torch.allclose(out_buggy, oracle, atol=1e-4))
    return x, layer, oracle, out, out_buggy  # for worked_examples


@triton.jit
def probe_bias_kernel(bias_ptr, out_ptr, M, BLOCK_M: tl.constexpr):
    # Stores in out (M,) what the buggy kernel's load picks up from bias (N,).
    rows = tl.arange(0, BLOCK_M)
    bias = tl.load(bias_ptr + rows, mask=rows < M, other=0.0)  # BUG: bias has N elements, not M
    tl.store(out_ptr + rows, bias, mask=rows < M)


def worked_examples(x, layer, oracle, out, out_buggy):
    print("\n=== Worked Example 20.1.1 ===")
    print("shapes: x", x.shape, "weight", layer.weight.shape,
          "bias", layer.bias.shape, "out", out.shape)
    print("allclose to nn.Linear + gelu oracle?", torch.allclose(out, oracle, atol=1e-4))
    print("max abs diff:", (out - oracle).abs().max().item())

    print("\n=== Worked Example 20.1.2 ===")
    print("buggy kernel allclose to oracle?", torch.allclose(out_buggy, oracle, atol=1e-4))
    print("max abs diff:", (out_buggy - oracle).abs().max().item())

    # The probe's bias is a view too: past its end lie values of ours, from -1000 downwards.
    M, N = out.shape
    owned = torch.cat([torch.arange(N), -1000 - torch.arange(M)]).float().to(DEVICE)
    probe = torch.empty(M, device=DEVICE)
    probe_bias_kernel[(1,)](owned[:N], probe, M, BLOCK_M=triton.next_power_of_2(M))
    print(f"\nbias of {N} values, read at 0 to {M - 1}:")
    print(probe.int().tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worked-examples", action="store_true", help="print the examples too")
    # Pasted into a notebook there is no __file__, and sys.argv is not for this script.
    arguments = parser.parse_args(sys.argv[1:] if "__file__" in globals() else [])
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    results = section_20_1()
    if arguments.worked_examples:
        worked_examples(*results)
