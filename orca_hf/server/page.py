"""The status page, and the numbers that it shows."""

import base64
import hashlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse

from orca_hf.serving import ServingStats


def as_json(stats: ServingStats, after: int = 0) -> dict[str, Any]:
    """What `/status.json` says of an engine.

    Args:
        stats: The engine's.
        after: Its recent iterations come without the first `after` of all; who asks once a second has those.
    """
    # Not dataclasses.asdict: it copies every share, which with hundreds of requests holds the event loop up.
    shown = {field.name: getattr(stats, field.name) for field in fields(stats)}
    num_new = max(0, min(len(stats.recent), stats.num_iterations - after))
    recent = stats.recent[len(stats.recent) - num_new :]
    shown["recent"] = [{"started": it.started, "duration": it.duration, "shares": it.shares} for it in recent]
    return shown


class StatusPage:
    """The page at `/`. It holds nothing of this server: it asks `/status.json`, with a key if there is one.

    The browser is told to run its own script only, and to ask nobody else for anything.
    """

    def __init__(self) -> None:
        self._text = Path(__file__).with_name("status.html").read_text(encoding="utf-8")
        policy = {
            "default-src": "'none'",
            "script-src": _hash_of("script", self._text),
            "style-src": _hash_of("style", self._text),
            "img-src": "data:",  # its icon
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        self._headers = {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def response(self) -> HTMLResponse:
        """A new one."""
        return HTMLResponse(self._text, headers=self._headers)


def _hash_of(element: str, text: str) -> str:
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
