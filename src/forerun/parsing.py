"""JSON and YAML that somebody else wrote: whatever Python's readers make of it, the error is a ValueError."""

from __future__ import annotations

import json
from typing import Any

TOO_DEEP = "it is nested too deep"


def json_of(text: str | bytes) -> Any:
    """The content of a JSON text.

    Raises:
        ValueError: it is no JSON (`json.JSONDecodeError`), no UTF-8 (`UnicodeDecodeError`), nested deeper than Python
            follows, or has a number of more digits than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def yaml_of(text: str) -> Any:
    """The content of a YAML text, read safely.

    Raises:
        ValueError: it is no YAML, is nested deeper than Python follows, or has a number or date that is none.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


__all__ = ["json_of", "yaml_of"]
