"""Whether a call lets other threads of the interpreter run."""

import sys
import threading
from collections.abc import Callable


def lets_others_run(call: Callable[[], object]) -> bool:
    """Calls up to 200 times, until a waiting thread has run."""
    asked, has_run = threading.Lock(), threading.Event()
    asked.acquire()
    other = threading.Thread(target=lambda: asked.acquire() and has_run.set())
    other.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that it runs only when this thread lets it
    try:
        asked.release()
        for _ in range(200):
            if has_run.is_set():
                return True
            call()
        return has_run.is_set()
    finally:
        sys.setswitchinterval(before)
        other.join()
