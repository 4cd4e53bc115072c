"""At which addresses a process can be reached; programs of tests ask it of themselves, too."""

import psutil


def reachable_at(process: psutil.Process) -> set[str]:
    """Return the addresses that a process listens on, or takes datagrams at from anybody."""
    return {
        one.laddr.ip
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
        or (one.status == psutil.CONN_NONE and one.laddr and not one.raddr)
    }
