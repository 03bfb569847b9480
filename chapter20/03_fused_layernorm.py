"""Section 20.3: the complete fused LayerNorm kernel, and the eps-placement trap.

    python chapter20/03_fused_layernorm.py
    python chapter20/03_fused_layernorm.py --worked-examples

layernorm_forward_kernel gives each row to one program: Section 20.2's reduction, then the scaling
by gamma and beta, with the row read once and written once.

layernorm_forward_kernel_wrong_eps is the same kernel with eps outside the square root. On typical
rows nobody can tell; on a near-constant row its output is 283 times too large.
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


def triton_layernorm(x, gamma, beta, eps=1e-5, kernel=layernorm_forward_kernel):
    """LayerNorm over the last dimension, in one kernel launch (Section 20.3).

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


def layernorm(x, module, kernel=layernorm_forward_kernel):
    """What the kernel gives for x and a torch.nn.LayerNorm's own parameters, back on the CPU."""
    gamma, beta = module.weight.to(DEVICE), module.bias.to(DEVICE)
    return triton_layernorm(x.to(DEVICE), gamma, beta, module.eps, kernel).cpu()


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
    print("=== Section 20.3: fused LayerNorm vs. a real torch.nn.LayerNorm module ===")
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


def worked_examples():
    print("\n=== Worked Example 20.3.1 ===")
    module, x = module_and_input()
    out, oracle = layernorm(x, module), module(x)
    print("allclose to nn.LayerNorm?", torch.allclose(out, oracle, atol=1e-4))
    print("max abs diff:", (out - oracle).abs().max().item())

    print("\n=== Worked Example 20.3.2 ===")
    module, typical, near_constant = module_and_rows()
    correct, oracle = layernorm(typical, module), module(typical)
    wrong = layernorm(typical, module, layernorm_forward_kernel_wrong_eps)
    print(
        f"typical row: correct allclose? {torch.allclose(correct, oracle, atol=1e-4)}  "
        f"wrong-eps allclose? {torch.allclose(wrong, oracle, atol=1e-4)}  "
        f"max diff (wrong): {(wrong - oracle).abs().max().item()}"
    )
    correct_flat, oracle_flat = layernorm(near_constant, module), module(near_constant)
    wrong_flat = layernorm(near_constant, module, layernorm_forward_kernel_wrong_eps)
    print(
        f"near-constant row: correct allclose? "
        f"{torch.allclose(correct_flat, oracle_flat, atol=1e-4)}  "
        f"wrong-eps allclose? {torch.allclose(wrong_flat, oracle_flat, atol=1e-4)}"
    )
    difference = (wrong_flat - oracle_flat).abs().max().item()
    print("near-constant row max diff (wrong-eps vs oracle):", difference)
    print("\noracle_flat:", oracle_flat)
    print("wrong_flat: ", wrong_flat)


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
    section_20_3()
    if args.worked_examples:
        worked_examples()


if __name__ == "__main__":
    main()
