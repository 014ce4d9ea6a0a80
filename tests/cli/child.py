"""A child process for the supervisor's tests: a health service that misbehaves when told to."""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from foredraft.rpc.lifetime import run
from foredraft.rpc.server import RpcServer, serve


async def main(arguments: argparse.Namespace) -> int:
    print(f"pid {os.getpid()}", flush=True)
    if arguments.fail:
        print("cannot find the weights", flush=True)
        return 3
    server = RpcServer(arguments.listen)
    await server.start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: time.sleep(3600))
    if arguments.orphan:
        # Holds this process's output open and does not know the supervisor.
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        print(f"orphan {orphan.pid}", flush=True)
    await asyncio.sleep(arguments.delay)
    await server.set_serving()
    loop.add_signal_handler(signal.SIGUSR2, os._exit, 7)
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.sleep(3600)
    await serve(server)
    if arguments.journal:
        with Path(arguments.journal).open("a") as journal:
            journal.write(f"{arguments.name}\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--name", default="")
    parser.add_argument("--journal", default="")
    parser.add_argument("--delay", type=float, default=0)
    for switch in ("--fail", "--stubborn", "--orphan"):
        parser.add_argument(switch, action="store_true")
    parsed = parser.parse_args()
    sys.exit(run(lambda: main(parsed)))
