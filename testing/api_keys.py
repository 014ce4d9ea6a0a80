"""API keys for tests of the gateway, with their rights."""

import hashlib
from pathlib import Path

SECRETS = {name: f"{name}-0123456789abcdef" for name in ("main", "alice", "bob", "carol", "dave")}


def bearer(name: str) -> dict[str, str]:
    """Returns the header that shows a key."""
    return {"authorization": f"Bearer {SECRETS[name]}"}


def write_keys(path: Path) -> Path:
    """Writes a file of all keys but "main", with limits for some of them."""
    digest = hashlib.sha256(SECRETS["dave"].encode()).hexdigest()
    path.write_text(
        "# name secret limits\n"
        f"alice {SECRETS['alice']} concurrent=1\n"
        f"bob {SECRETS['bob']} requests=2   # two a minute\n\n"
        f"carol {SECRETS['carol']} tokens=60\n"
        f"dave sha256:{digest}\n"
    )
    path.chmod(0o600)
    return path
