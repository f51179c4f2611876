"""Identity of a tokenizer's chat template, without importing transformers."""

from __future__ import annotations

import hashlib
from typing import Any


def effective_chat_template(tokenizer: Any) -> str:
    """Return the template a tokenizer renders with: of several named ones "default", else the first; else ""."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default") or next(iter(template.values()), None)
    return template or ""


def tokenizer_chat_template_sha256(tokenizer: Any) -> str:
    """Return the sha256 of the UTF-8 text of a tokenizer's effective chat template, verbatim."""
    return hashlib.sha256(effective_chat_template(tokenizer).encode()).hexdigest()
