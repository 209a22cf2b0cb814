"""`TraceLinks`: links from jobs to the tracing system. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from worqr.errors import UsageError

PLACE: Final = "{trace_id}"
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_NO_TRACE: Final = "0" * 32


class TraceLinks:
    """Makes the links. `template` is the address of a trace, with ``{trace_id}`` in it; empty: there are none."""

    def __init__(self, template: str) -> None:
        """Raise UsageError if the template is not valid."""
        if template and (PLACE not in template or not re.match(r"https?://[^/\s]", template)):
            raise UsageError(
                f"trace_url must be an address with {PLACE} in it, such as https://traces.example.org/trace/{PLACE}, "
                f"not {template!r}"
            )
        self._template = template

    def link(self, meta: Mapping[str, str]) -> str:
        """Return the address of the trace of a job with this `meta`; empty if it has none, as W3C Trace Context says."""
        found = _TRACEPARENT.fullmatch(meta.get("traceparent", ""))
        if not self._template or found is None or found[1] == _NO_TRACE:
            return ""
        return self._template.replace(PLACE, found[1])
