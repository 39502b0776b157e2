"""Options of TCP sockets that the gateway sets through either loop's transports."""

from __future__ import annotations

import asyncio
import socket
import struct

# A peer that lost power never says goodbye: asked after a minute of silence, given up after two.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def watch_for_dead_peer(transport: asyncio.Transport) -> None:
    """Have the kernel notice a peer that is gone without a word."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)  # TCP_KEEPIDLE has another name on macOS
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def reset(transport: asyncio.Transport) -> None:
    """Close with RST: what was not sent yet is lost, and the peer sees an error, not an end."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
