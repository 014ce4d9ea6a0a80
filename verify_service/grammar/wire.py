"""Messages between the verifier and its grammar worker: JSON preceded by its length."""

import json
import struct
from typing import Any

HEAD = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """Encodes a message."""
    body = json.dumps(message).encode()
    return HEAD.pack(len(body)) + body
