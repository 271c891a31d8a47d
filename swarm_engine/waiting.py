"""What may take long is not done on an event loop, where everybody would wait for it."""

from __future__ import annotations

import asyncio


class TakesLongError(Exception):
    """Not done, for this is an event loop and it may take long: to be tried again on a thread."""


def is_event_loop() -> bool:
    """Whether an event loop runs on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
