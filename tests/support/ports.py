# SPDX-License-Identifier: Apache-2.0
"""Find ports for servers that a test starts."""

import socket

_held: list[socket.socket] = []  # until this process ends


def free_ports(count):
    """Find TCP ports of the loopback interface, and hold them for servers of this test until this process ends.

    A port that was only found could be given to another process before the server binds it. A socket that is bound to
    it, but does not listen, prevents that; a server binds it all the same, because TCPStore, gRPC and aiohttp set
    SO_REUSEADDR.
    """
    found = []
    for _ in range(count):
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        found.append(holder.getsockname()[1])
        _held.append(holder)
    return found


def free_port():
    """Find and hold one port."""
    return free_ports(1)[0]
