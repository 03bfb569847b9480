"""Watches every kernel that the tests interpret: what it reads and writes, address by address.

An access outside the tensors that the kernel was given raises before it is made, so that a kernel
that strays fails its test, and neither crashes it nor passes by luck. On a GPU nothing is watched.
"""

import contextlib

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

# What the chapter has read past the end of its tensor on purpose: up to the end of its buffer.
READS_PAST_THE_END = {
    ("fused_linear_gelu_kernel_buggy_bias_axis", "bias_ptr"),
    ("probe_bias_kernel", "bias_ptr"),
}


def addresses(tensor):
    """The address of each element, in an array of the tensor's shape."""
    indices = np.indices(tensor.shape, sparse=True)
    offsets = sum(i * stride for i, stride in zip(indices, tensor.stride(), strict=True))
    return tensor.data_ptr() + tensor.element_size() * np.broadcast_to(offsets, tensor.shape)


class Launch:
    """One launch: the kernel's name, its tensors by argument, the addresses read and written."""

    def __init__(self, name, arguments):
        self.name = name
        # A descriptor may reach as far as the tensor that it was made of.
        bases = {k: getattr(v, "base", v) for k, v in arguments.items()}
        self.tensors = {k: v for k, v in bases.items() if isinstance(v, torch.Tensor)}
        self.reads, self.writes = [], []
        self.writable = np.unique(np.concatenate([addresses(t).ravel() for t in self.values()]))
        past_the_end = [
            addresses(torch.empty(0).set_(t.untyped_storage()))
            for argument, t in self.tensors.items()
            if (name, argument) in READS_PAST_THE_END
        ]
        self.readable = np.unique(np.concatenate([self.writable, *past_the_end]))

    def values(self):
        return self.tensors.values()

    def access(self, kind, log, allowed, pointers, mask):
        touched = np.asarray(pointers.data)[np.broadcast_to(mask.data, pointers.data.shape)]
        touched = touched.astype(np.int64)
        nearest = np.searchsorted(allowed, touched).clip(max=len(allowed) - 1)
        stray = touched[allowed[nearest] != touched] if len(allowed) else touched
        if len(stray):
            bases = {argument: t.data_ptr() for argument, t in self.tensors.items()}
            argument = min(bases, key=lambda a: abs(int(stray[0]) - bases[a]))
            element = (int(stray[0]) - bases[argument]) // self.tensors[argument].element_size()
            raise AssertionError(
                f"{self.name} {kind} {len(stray)} elements that are not its own, the first at "
                f"{argument}[{element}]"
            )
        log.append(touched)

    def read(self, tensor=None):
        """Addresses read, as often as they were: all, or those of a tensor's buffer."""
        return within(self.reads, tensor)

    def written(self, tensor=None):
        return within(self.writes, tensor)


def within(log, tensor):
    log = np.concatenate(log) if log else np.empty(0, np.int64)
    if tensor is None:
        return log
    storage = tensor.untyped_storage()
    return log[(log >= storage.data_ptr()) & (log < storage.data_ptr() + storage.nbytes())]


_recorders = []


@contextlib.contextmanager
def record():
    """The launches made within the block, as a list of Launch."""
    launches = []
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.pop()


def watch():
    """Has Triton's interpreter report each launch, load and store; for the whole process."""
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store
    run = executor.__call__
    launch = None

    def load(pointers, mask, *rest, **options):
        launch.access("reads", launch.reads, launch.readable, pointers, mask)
        return masked_load(pointers, mask, *rest, **options)

    def store(pointers, value, mask, *rest, **options):
        launch.access("writes", launch.writes, launch.writable, pointers, mask)
        return masked_store(pointers, value, mask, *rest, **options)

    def call(self, *args, **kwargs):
        nonlocal launch
        with _disable_current_modes():  # what the interpreter does is not the wrapper's doing
            arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
            launch = Launch(self.fn.__name__, arguments)
            for launches in _recorders:
                launches.append(launch)
            run(self, *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = load, store
    executor.__call__ = call
    # It copies each argument's whole buffer onto itself, 12 GiB of it in one of the tests.
    executor._restore_args_dev = lambda self, *_: None
