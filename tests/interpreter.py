"""Triton's interpreter as the tests use it: two faults mended, and what costs most of its time and changes no result left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

try:
    from triton.language import core
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


def keep_splats_bool():
    """Triton's interpreter makes int32 of a scalar comparison that meets a block; from 3.9 on its loads refuse that as a mask."""
    create_splat = interpreter.InterpreterBuilder.create_splat

    def create(self, ret_ty, arg):
        splat = create_splat(self, ret_ty, arg)
        if arg.data.dtype == bool:
            splat.data = splat.data.astype(bool)
        return splat

    interpreter.InterpreterBuilder.create_splat = create


def keep_subnormals():
    """Triton's interpreter makes other numbers, or 0, of subnormals when it casts between float32 and bf16."""
    convert = interpreter._convert_float

    def exact(data, source, target, rounding):
        out = convert(data, source, target, rounding)
        if (source.name, target.name) == ("bf16", "fp32"):
            small = (data.view(np.uint16) & 0x7F80) == 0
            out[small] = data.view(np.uint16)[small].astype(np.uint32) << 16
        elif (source.name, target.name) == ("fp32", "bf16"):
            whole = data.view(np.uint32)
            small = (whole & 0x7F800000) == 0
            bits = whole[small]
            out[small] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return out

    interpreter._convert_float = exact


def check_no_overflow():
    """Every sum of integers is computed once more in int64, for an assertion that only `debug` makes: 30% of a run."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def patch_once():
    """Every call of a device function patches Triton's language anew, as its kernel's launch has done: 30% of a run."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_new(fn):
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            return patch(fn)

    def launch_new(self, *args, **kwargs):
        patched.clear()  # a launch restores what it has patched
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_new


def remember_types():
    """A type is made, and a tensor's shape worked out, at every operation, out of the same few: half of what is left."""

    def once(of, key):
        known = {}

        def call(*args):
            at = key(*args)
            if at not in known:
                known[at] = of(*args)
            return known[at]

        return call

    interpreter._get_np_dtype = once(interpreter._get_np_dtype, lambda t: t.name)
    builder = interpreter.InterpreterBuilder
    builder.get_block_ty = once(builder.get_block_ty, lambda self, t, shape: (t.name, *shape))
    core.block_type.with_element_ty = once(core.block_type.with_element_ty, lambda self, t: (self.name, t.name))
    create, known = core.tensor.__init__, {}

    def tensor(self, handle, type):
        if type.name not in known:
            create(self, handle, type)
            known[type.name] = {name: value for name, value in vars(self).items() if value is not handle}
        vars(self).update(known[type.name], handle=handle)

    core.tensor.__init__ = tensor


def prepare():
    if interpreter is not None:
        for change in (keep_splats_bool, keep_subnormals, check_no_overflow, patch_once, remember_types):
            change()
