"""What a coordinator and its nodes say to each other: lines of JSON over TCP, and a beat each second."""

from __future__ import annotations

import asyncio
import json
from typing import Any

BEAT_S = 1.0

NODE_SILENCE_S = 5.0
"""A node that has not heard the coordinator for so long ends its ranks: it may be cut off."""

SILENCE_S = 7.0
"""A coordinator that has not heard a node for so long counts it as lost. The larger of the two: the ranks of a
node that is cut off have ended before others go on in their place."""

NO_SECRET = "RDZV_ID is not set; set it on all nodes to a secret (openssl rand -hex 16): whoever has it may join"


Message = dict[str, Any]


def say(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Send a message; one to a connection that is lost goes nowhere."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def hear(reader: asyncio.StreamReader, within_s: float) -> Message | None:
    """Return the next message, or None once the other side has gone or is silent."""
    try:
        line = await asyncio.wait_for(reader.readline(), within_s)
        message = json.loads(line) if line else None
    except (TimeoutError, OSError, ValueError):  # ValueError: not JSON, or longer than any of ours
        return None
    return message if isinstance(message, dict) else None


def hang_up(writer: asyncio.StreamWriter) -> None:
    """Drop a connection at once: a polite end would wait for a link that is down."""
    writer.transport.abort()
