"""A file system of few bytes, which only this process's child sees: for disks and memory that are full."""

import ctypes
import os
import traceback
import warnings

import pytest

_NEW_MOUNTS, _PRIVATE = 0x20000, 0x4000 | 0x40000  # of Linux: CLONE_NEWNS; MS_REC | MS_PRIVATE

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def on_small_disk(place, size, work):
    """Do some work in a child that finds an empty tmpfs of `size` bytes at `place`; its exit status.

    0 if the work returns something false, else what it returns; 99 if it raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: the child uses none
        child = os.fork()
    if not child:
        code = 99
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            mounted = libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE, None)
            mounted = mounted or libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode())
            assert not mounted, os.strerror(ctypes.get_errno())
            code = int(work() or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def resize(place, size):
    """Give the file system at a place another size; for work on a small disk."""
    remount = 0x20  # MS_REMOUNT
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", remount, f"size={size}".encode())
    assert not failed, os.strerror(ctypes.get_errno())
