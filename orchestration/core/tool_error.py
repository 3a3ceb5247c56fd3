"""What a tool may raise to say, in its own words, why it failed. Every other exception is masked before a caller reads of it."""

from __future__ import annotations

import re

_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolError(Exception):
    """A failure that the caller, and so the model, may read: raise it from a `@tool` function.

    The codes `rate_limit_exceeded` and `expired` say that nothing ran, so the call may be asked again; `unknown_outcome`
    says that it may have run. Every other code is a failure for good.

    Args:
        code: 1 to 64 characters of letters, digits, `_`, `.`, `-`; anything else becomes `internal_error`.
        message: what the model reads; keep secrets out of it.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code if isinstance(code, str) and _CODE.fullmatch(code) else "internal_error"
        self.message = str(message)
