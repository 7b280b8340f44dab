"""torchft's Lighthouse as a process of its own: prints its port as a JSON line, runs until stdin ends."""

from __future__ import annotations

import json
import os
import sys
from urllib.parse import urlsplit

from torchft.coordination import LighthouseServer


def main() -> None:
    # A replica that died is missed after the heartbeat timeout; one that is alive and late is waited for.
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=int(sys.argv[1]),
        join_timeout_ms=1000 * int(sys.argv[2]),
        heartbeat_timeout_ms=2_000,
    )
    print(json.dumps({"event": "ready", "port": urlsplit(server.address()).port}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
