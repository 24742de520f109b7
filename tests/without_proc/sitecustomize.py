"""Hides from `fsdp_helpers` what only Linux has: /proc and prctl. psutil, tests and libraries still see them.

`make test-spawn` puts this folder on PYTHONPATH, so that every Python started there, ranks and kernels too, begins with it.
"""

import builtins
import ctypes
import io
import os
import sys

BETWEEN = {"contextlib", "genericpath", "glob", "io", "os", "pathlib", "posixpath"}  # through which the package asks


def hides() -> bool:
    """Whether the package asks."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    return frame is not None and "/fsdp_helpers/" in frame.f_code.co_filename


def without_proc(function):
    def asked(path=".", *arguments, **settings):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc") and hides():
            raise FileNotFoundError(2, "hidden by tests/without_proc", os.fspath(path))
        return function(path, *arguments, **settings)

    return asked


def without_prctl(library, name, found=ctypes.CDLL.__getattr__):
    if name == "prctl" and hides():
        raise AttributeError("prctl is hidden by tests/without_proc")
    return found(library, name)


builtins.open = io.open = without_proc(open)
for name in ("listdir", "scandir", "stat"):
    setattr(os, name, without_proc(getattr(os, name)))
ctypes.CDLL.__getattr__ = without_prctl
