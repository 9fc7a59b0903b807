"""Takes network, other processes, and files outside its folder from a grading process before it loads a reward.

Four layers without a library: a network namespace (the only one that needs privileges), Landlock (files), a seccomp
filter (system calls), and resource limits. They cannot be undone and also bind later threads and modules.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_BYTES = 64 << 20  # of one file in the scratch folder
MAX_OPEN_FILES = 512
SYSTEM_FILES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/dev/null", "/dev/urandom")

_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def enter(scratch: Path) -> list[str]:
    """Enter the sandbox for good, and return the rights that this system could not take away.

    Still allowed: reading files (until ``read_code_only``), writing into ``scratch``, threads, memory, and open file
    descriptors.
    """
    if sys.platform != "linux":
        return [f"network, processes and files (there is no sandbox for {sys.platform})"]
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    alone = _leave_network()
    _drop_capabilities()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    files = restrict_writing([scratch, Path("/dev/null")])
    filtered = install_filter(deny_writing=not files)
    missing = [] if files else ["reading files"]
    if not alone and not filtered:
        missing.append("network")
    if not filtered:
        missing.append("processes")
    if not files and not filtered:
        missing.append("writing files")
    return missing


def read_code_only(scratch: Path) -> None:
    """Allow reading only ``scratch`` and, for later imports, the interpreter and the loaded packages."""
    folders = {scratch, Path(sys.prefix), Path(sys.base_prefix), *map(Path, SYSTEM_FILES)}
    for name, module in list(sys.modules.items()):
        if "." not in name:
            folders.update(map(Path, vars(module).get("__path__", ())))
    restrict_reading(sorted(folders))


def _limit(kind: int, wanted: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (value, value))


def _call(function: str, *arguments: object) -> int:
    """Call a function of libc with integers, None and buffers; -1 if it fails."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = getattr(ctypes.CDLL(None, use_errno=True), function)(*words)
    return result


def _leave_network() -> bool:
    """Enter a network namespace, which has only an unconfigured loopback. Users other than root also need a user
    namespace, which some systems and most containers refuse."""
    return _call("unshare", _CLONE_NEWNET) == 0 or _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET) == 0


_CAPABILITY_VERSION = 0x20080522
_CAP_DAC_READ_SEARCH = 2


def _drop_capabilities() -> None:
    """Leave root only the right to read all files. With more it could read the trainer's memory."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable; for the lower and the upper 32
    if _call("capget", header, sets) == 0:
        kept = struct.unpack("=6I", sets.raw)[1] & (1 << _CAP_DAC_READ_SEARCH)
        _call("capset", header, ctypes.create_string_buffer(struct.pack("=6I", kept, kept, 0, 0, 0, 0), 24))


# Landlock: include/uapi/linux/landlock.h. Its system calls have the same numbers on every machine.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_DIRECTORY_WRITES = sum(1 << bit for bit in range(4, 13))  # remove and make files, folders, links, sockets, devices
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE  # the others are for folders


def restrict_writing(writable: Iterable[Path]) -> bool:
    """Allow writing only to these files and below these folders. This also ends access to other processes' /proc.

    Returns:
        False if the kernel has no Landlock (before 5.13, or switched off).
    """
    return _restrict(_WRITE_FILE | _DIRECTORY_WRITES | _REFER | _TRUNCATE, writable)


def restrict_reading(readable: Iterable[Path]) -> bool:
    """Allow reading only these files and below these folders; False as for ``restrict_writing``."""
    # Without the right to refer, files could not move between folders, not even in the scratch folder.
    return _restrict(_READ_FILE | _READ_DIR | _REFER, readable)


def _restrict(rights: int, allowed: Iterable[Path]) -> bool:
    version = _call("syscall", _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    if version < 1:
        return False
    rights &= ~((0 if version > 1 else _REFER) | (0 if version > 2 else _TRUNCATE))
    attributes = ctypes.create_string_buffer(struct.pack("=Q", rights), 8)
    ruleset = _call("syscall", _LANDLOCK_CREATE, attributes, 8, 0)
    if ruleset < 0:
        return False
    try:
        for path in allowed:
            _allow(ruleset, rights, path)
        return _call("syscall", _LANDLOCK_RESTRICT, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _allow(ruleset: int, rights: int, path: Path) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", rights if path.is_dir() else rights & _FILE_RIGHTS, place)
        if _call("syscall", _LANDLOCK_ADD, ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0) < 0:
            raise OSError(ctypes.get_errno(), f"Landlock refuses a rule for {path}")
    finally:
        os.close(place)


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a processor that a seccomp filter needs."""

    audit: int  # AUDIT_ARCH_*
    column: int  # of the tables below
    seccomp: int  # the system call's number
    other_abi: int | None  # numbers from here on belong to a second set of system calls


MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(0xC000003E, 0, 317, 0x40000000),
    "aarch64": Machine(0xC00000B7, 1, 277, None),
}

# name: (x86-64, aarch64). aarch64 has no older forms, such as fork and open.
DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # Network, and io_uring, which could do everything in this table. socketpair stays: it reaches nobody.
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "listen": (50, 201),
    "accept4": (288, 242), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Other programs and processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    # Owners, modes and times of files, which Landlock does not guard
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    # The machine
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
}  # fmt: skip
# Without Landlock nothing can be written, not even in the scratch folder.
DENIED_WRITES: Mapping[str, tuple[int | None, int | None]] = {
    "creat": (85, None), "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None),
    "mknodat": (259, 33),
}  # fmt: skip
# by their arguments
_CLONE, _CLONE3, _KILL, _TGKILL, _IOCTL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (16, 29), (302, 261)
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)

_CLONE_THREAD = 0x10000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # type into the terminal
_OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_DENY, _ABSENT = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS  # programs know what to do without clone3
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value: struct sock_filter


def filter_program(machine: Machine, pid: int, *, deny_writing: bool) -> list[Instruction]:
    """The classic BPF program that filters system calls; ``pid`` is the only process that may be signalled.

    It reads only the low 32 bits of an argument. The kernel uses no more of the arguments that are compared here.
    """

    def when(pair: tuple[int | None, int | None], *body: Instruction) -> list[Instruction]:
        number = pair[machine.column]
        return [] if number is None else [(_EQUAL, 0, len(body), number), *body]

    def argument(index: int) -> Instruction:
        return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)

    allow, deny, absent = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ABSENT)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, machine.audit),  # another set of system calls, such as the 32-bit one
        deny,
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine.other_abi is not None:
        program += [(_AT_LEAST, 0, 1, machine.other_abi), deny]
    program += when(_CLONE, argument(0), (_HAS_BIT, 0, 1, _CLONE_THREAD), allow, deny)
    program += when(_CLONE3, absent)
    program += when(_KILL, argument(0), (_EQUAL, 0, 1, pid), allow, deny)
    program += when(_TGKILL, argument(0), (_EQUAL, 0, 1, pid), allow, deny)
    program += when(_PRLIMIT, argument(0), (_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, pid), allow, deny)
    program += when(_IOCTL, argument(1), (_EQUAL, 1, 0, _TIOCSTI), (_EQUAL, 0, 1, _TIOCLINUX), deny, allow)
    denied = dict(DENIED)
    if deny_writing:
        denied |= DENIED_WRITES
        program += when(_OPEN, argument(1), (_HAS_BIT, 0, 1, _OPEN_TO_WRITE), deny, allow)
        program += when(_OPENAT, argument(2), (_HAS_BIT, 0, 1, _OPEN_TO_WRITE), deny, allow)
        program += when(_OPENAT2, absent)
    for pair in denied.values():
        program += when(pair, deny)
    return [*program, allow]


_SECCOMP_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4  # without it, kernels before 5.16 slow the whole process down


def install_filter(*, deny_writing: bool) -> bool:
    """Install the filter for good; False if the kernel refuses it, or the processor is not in ``MACHINES``."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return False
    program = filter_program(machine, os.getpid(), deny_writing=deny_writing)
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("@HP", len(program), ctypes.addressof(instructions))  # struct sock_fprog
    wanted = ctypes.create_string_buffer(header, len(header))
    flags = (_SPEC_ALLOW, 0)
    return any(_call("syscall", machine.seccomp, _SECCOMP_SET_MODE_FILTER, flag, wanted) == 0 for flag in flags)
