"""Run a command in its own network namespace, which has loopback only.

    python -IS own_network.py PROGRAM ARGUMENT...

Servers that listen on all addresses there are unreachable from outside. With CAP_SYS_ADMIN the
namespace is created directly, otherwise inside a user namespace in which this user keeps its id
(namespaces(7), user_namespaces(7)); the command gains no privileges. It replaces this process
(exec), so signals and exit codes are its own. Only the standard library is imported, because the
command's environment decides which other packages would be found.

Not covered: systems other than Linux; those that forbid user namespaces, as many containers and
Ubuntu's AppArmor profiles do; setuid programs, which cannot gain privileges there.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Final

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 0x1
INTERFACE: Final = struct.Struct("16sH22x")
"""struct ifreq of netdevice(7): name and flags."""

NO_NETWORK_EXIT: Final = 125
"""No namespace could be created; nothing was run."""
NO_PROGRAM_EXIT: Final = 127


def enter() -> None:
    """Move this process into its own network namespace.

    Raises:
        OSError: the system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET):
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(any_socket, SIOCGIFFLAGS, INTERFACE.pack(b"lo", 0))
        _, flags = INTERFACE.unpack(reply)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, INTERFACE.pack(b"lo", flags | IFF_UP))


def main(command: list[str]) -> int:
    """Replace this process by the command; returns only if that fails."""
    try:
        enter()
    except (OSError, AttributeError) as error:
        sys.stderr.write(f"{getattr(error, 'strerror', None) or error}\n")
        return NO_NETWORK_EXIT
    if not command:
        return 0
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    return NO_PROGRAM_EXIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
