"""Runs code in a sandbox: a forked process, within limits, that may only compute, read files and start threads.

The sandbox is for code that could crash, hang, take all memory, or harm other processes. The process is a copy of this
one, so all modules and functions of this process exist in it, and nothing has to be imported by name. The kernel
refuses every system call that is not in a list (seccomp, which needs no privileges): the process cannot write to a
file, connect, signal another process or start a program. The process answers with bytes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shoestring import figures
from shoestring.confined import LimitError
from shoestring.lifetime import end_with


@dataclass(frozen=True)
class SandboxBounds:
    """Limits of a sandboxed process."""

    memory: int = 1 << 30
    """Bytes that the process may allocate in addition to those that it has at its start."""
    processor: int = 10
    """Processor time in seconds."""
    seconds: float = 30.0
    """Time in seconds after which the process is killed."""


USUAL = SandboxBounds()
REPLY = 1 << 20
"""Maximum size of the answer in bytes."""
_FILES = 64  # open files
_exit = os._exit  # saved, because `work` may replace os._exit
_STARTS, _SLOW_START = 3, 10.0  # attempts, seconds; a lock held by another thread at the fork can block the start
_SLOW_END = 1000  # milliseconds within which a process must end after it has closed its pipe
_READY, _DONE, _FAILED = b"r", b"d", b"f"


def run_in_sandbox(prepare: Callable[[], object], work: Callable[[], bytes], bounds: SandboxBounds = USUAL) -> bytes:
    """Call `work` in a sandboxed process, and return the result.

    Args:
        prepare: called in the process before `work`, without limits, for preparations that should not count as work.

    Raises:
        LimitError: `work` raised an error, exceeded a limit, or ended the process; or the process could not be
            confined, in which case `work` was not called.
    """
    for _ in range(_STARTS):
        try:
            answer = _answer_of_process(prepare, work, bounds)
        except OSError as error:
            raise LimitError(f"no process could be started for it: {error}") from error
        if answer is None:
            continue
        if answer[:1] == _DONE:
            return answer[1:]
        raise LimitError(printable(answer[1:].decode(errors="replace")))
    raise LimitError("no process could be started for it")


def _answer_of_process(prepare: Callable[[], object], work: Callable[[], bytes], bounds: SandboxBounds) -> bytes | None:
    """Return the answer of a forked process, or one made here if it gives none; None if it does not start."""
    parent, secret = os.getpid(), os.urandom(16)  # answers begin with `secret`, unlike bytes that `work` writes
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `fork` warns since Python 3.12 if other threads run
        pid = os.fork()
    if not pid:
        try:
            _serve(parent, writer, secret, prepare, work, bounds)
        finally:
            _exit(1)
    os.close(writer)
    end, started, late, answer, status = os.pidfd_open(pid), False, "", b"", 0
    try:
        started = _receive(reader, 1, _SLOW_START) == _READY
        answer = _receive(reader, REPLY, bounds.seconds) if started else b""
        ends = select.poll()
        ends.register(end, select.POLLIN)
        if not answer and not ends.poll(_SLOW_END):
            late = "it closed its connection"
    except TimeoutError:
        late = f"it took longer than {bounds.seconds:g} s"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        with suppress(ChildProcessError):  # a handler of SIGCHLD has already waited for the process
            status = os.waitpid(pid, 0)[1]
        os.close(end)
        os.close(reader)
    if not started:
        return None
    if answer and not late:
        begins = answer.startswith(secret)
        return answer[len(secret) :] if begins else _FAILED + b"its process answered with something else"
    return _FAILED + (late or _end_of(os.waitstatus_to_exitcode(status), bounds)).encode()


def printable(text: str, longest: int = 120) -> str:
    """The beginning of a text in one line, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:longest])


def _receive(reader: int, count: int, seconds: float) -> bytes:
    """Read `count` bytes from a pipe, or fewer if its other end was closed.

    Raises:
        TimeoutError: the bytes did not arrive within `seconds` seconds.
    """
    until, data, ready = time.monotonic() + seconds, b"", select.poll()
    ready.register(reader, select.POLLIN)
    while len(data) < count:
        if not ready.poll(max(until - time.monotonic(), 0.0) * 1000):
            raise TimeoutError
        part = os.read(reader, min(count - len(data), 1 << 16))
        if not part:
            break
        data += part
    return data


def _end_of(status: int, bounds: SandboxBounds) -> str:
    """Say why a process did not answer, according to its exit status."""
    if status == -signal.SIGXCPU:
        return f"it took more than {bounds.processor:g} s of processor time"
    if status < 0:
        return f"it ended its process by signal {signal.Signals(-status).name}"
    return f"it ended its process with status {status}"


# -- in the process ----------------------------------------------------------------------------------------------------


def _serve(
    parent: int,
    writer: int,
    secret: bytes,
    prepare: Callable[[], object],
    work: Callable[[], bytes],
    bounds: SandboxBounds,
) -> NoReturn:
    """Give up everything that the new process shares with other processes, call `work`, and write the answer."""
    gc.disable()  # garbage from before the fork belongs to the parent, which finalizes it
    faulthandler.disable()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    end_with(parent)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.closerange(3, writer)
    os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
    prepare()
    os.write(writer, _READY)
    for begin, size in _shared_memory():
        libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), _PROT_READ)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, taken + bounds.memory)
    _lower(resource.RLIMIT_NOFILE, _FILES)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, bounds.processor, bounds.processor + 1)  # soft limit: SIGXCPU, hard limit: SIGKILL
    try:
        _refuse_system_calls(libc)
        answer = _DONE + work()
    except _UnconfinedError as error:
        answer = _FAILED + str(error).encode()
    except MemoryError:
        answer = _FAILED + f"it took more than {figures.memory(bounds.memory)} of memory".encode()
    except BaseException as error:  # including SystemExit
        answer = _FAILED + described(error).encode(errors="replace")
    answer = secret + answer
    while answer:
        answer = answer[os.write(writer, answer) :]
    _exit(0)


def _lower(limit: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit of this process; a process without privileges cannot raise it again."""
    most = resource.getrlimit(limit)[1]
    wanted = (soft, soft if hard is None else hard)
    resource.setrlimit(
        limit, wanted if most == resource.RLIM_INFINITY else (min(wanted[0], most), min(wanted[1], most))
    )


def described(error: BaseException) -> str:
    """Describe an error that untrusted code raised; converting the error to text may raise another error."""
    try:
        text = str(error)[:200]
    except Exception:
        text = ""
    return f"it raised {type(error).__name__}" + (f": {text}" if text else "")


def _shared_memory() -> Iterator[tuple[int, int]]:
    """Yield the address and size of each memory mapping that is shared with other processes and writable."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions = line.split()[:2]
        if permissions.startswith("rw") and permissions.endswith("s"):
            begin, end = (int(address, 16) for address in place.split("-"))
            yield begin, end - begin


class _UnconfinedError(Exception):
    """The kernel cannot restrict the system calls of the process."""


_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ZEROS = (ctypes.c_ulong(0),) * 3
_PROT_READ = 1
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Maps a processor type to its column in `_ALLOWED` and `_filter`, and to its number in linux/audit.h."""
_NONE = 1 << 30  # no system call has this number
_ALLOWED: dict[str, tuple[int, int]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65),
    "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23),
    "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "set_tid_address": (218, 96),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "getcpu": (309, 168), "getrandom": (318, 278),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
    "stat": (4, _NONE), "lstat": (6, _NONE), "poll": (7, _NONE), "access": (21, _NONE), "readlink": (89, _NONE),
    "time": (201, _NONE),
}  # fmt: skip
"""Maps system calls that are allowed with any arguments to their numbers on x86-64 and on 64-bit Arm."""
_LOAD, _EQUALS, _GREATER, _HAS_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # instructions of linux/bpf_common.h
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050026  # `_REFUSE` is EPERM, `_UNKNOWN` ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_DUPLICATE = 1030  # F_DUPFD_CLOEXEC; commands up to 3 copy a descriptor or access flags, later ones direct signals
_CLONE_THREAD = 0x10000
Instruction = tuple[int, int, int, int]
"""An instruction: operation, number of instructions to skip if true, the same if false, and operand."""


def _filter() -> list[Instruction]:
    """Build the program that the kernel runs at each system call to decide whether the call is allowed."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        raise _UnconfinedError(f"a process cannot be confined on {sys.platform} {machine}")
    column, architecture = _MACHINES[machine]

    def argument(place: int, high: int = 0) -> Instruction:
        return _LOAD, 0, 0, _ARGUMENTS + 8 * place + 4 * high

    allow, refuse, unknown = ((_RETURN, 0, 0, value) for value in (_ALLOW, _REFUSE, _UNKNOWN))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    own = [argument(0), (_EQUALS, 0, 1, os.getpid()), allow, refuse]
    conditions: dict[tuple[int, int], Sequence[Instruction]] = {
        (2, _NONE): [argument(1), (_HAS_BIT, 0, 1, writing), refuse, allow],  # open
        (257, 56): [argument(2), (_HAS_BIT, 0, 1, writing), refuse, allow],  # openat
        (72, 25): [argument(1), (_EQUALS, 1, 0, _DUPLICATE), (_GREATER, 1, 0, 3), allow, refuse],  # fcntl
        (56, 220): [argument(0), (_HAS_BIT, 0, 1, _CLONE_THREAD), allow, refuse],  # clone
        (435, 435): [unknown],  # clone3; the C library then calls clone instead
        (62, 129): own,  # kill
        (234, 131): own,  # tgkill
        # prlimit64, without new limits
        (302, 261): [argument(2), (_EQUALS, 0, 3, 0), argument(2, 1), (_EQUALS, 0, 1, 0), allow, refuse],
    }
    program: list[Instruction] = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUALS, 1, 0, architecture), refuse]
    program.append((_LOAD, 0, 0, _NUMBER))
    for numbers in _ALLOWED.values():
        program += [(_EQUALS, 0, 1, numbers[column]), allow]
    for numbers, condition in conditions.items():
        program += [(_EQUALS, 0, len(condition), numbers[column]), *condition]
    return [*program, refuse]


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _refuse_system_calls(libc: ctypes.CDLL) -> None:
    """Make the kernel refuse, from now on, all system calls that are not allowed.

    Raises:
        _UnconfinedError: the kernel, system or processor does not support this.
    """
    instructions = _filter()
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    program = _FilterProgram(len(instructions), code)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), *_ZEROS) or libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), *_ZEROS[:2]
    ):
        raise _UnconfinedError(f"the kernel does not confine processes: {os.strerror(ctypes.get_errno())}")
