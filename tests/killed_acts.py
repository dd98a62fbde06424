"""A process that is killed before its nth act on files: opening, making, renaming or removing one."""

import itertools
import os
import signal
import sys
import warnings

ACTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "fcntl.flock", "ctypes.dlsym")


def killed_before(number, work, acts=ACTS, of=""):
    """Do some work in a child that is killed before act `number` on a path with `of` in it; whether it was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: the child uses none
        child = os.fork()
    if not child:
        count = itertools.count()

        def hook(event, arguments):
            paths = [os.fsdecode(each) for each in arguments if isinstance(each, str | bytes)]
            if event in acts and (not of or any(of in path for path in paths)) and next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(hook)
            work()
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0
