"""Floor 4: an OpenAI-compatible server over one engine. Needs the extra `serve`.

    options.py      what can be set               body.py, fields.py, schemas.py    what a request may say
    app.py          the application               prompt.py, parameters.py          from fields to prompt and sampling
    server.py       its state, from load to stop  chat.py, completions.py           the two endpoints
    routes.py       the routes                    grammar.py                        answers of a prescribed form
    security.py     key and request id            answer.py, answers.py             the text taken apart, and its JSON
    tools.py        how models call tools         calls.py                          such calls read
    gate.py         queue, deadlines, draining    account.py, metrics.py            tokens, times, drafting, Prometheus
    exchange.py     streams and disconnects       engine_series.py, loglines.py,    what operators watch
                                                  tracing.py, cards.py
    run.py          on a socket                   service.py, generation.py         one engine, one answer
    page/           what `/` shows                page_files.py, page_data.py,      how it gets there, and its numbers
                                                  page_frontier.py
    reliability.py  what confidences are worth    provenance.py                     where each token came from
    effective.py    what it was told              lanes.py                          threads for texts, long ones apart

The web framework is imported on first use, so that options can be checked without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.serve.app import create_app as create_app
    from forerun.serve.options import ServeOptions as ServeOptions
    from forerun.serve.run import serve as serve

_HOMES = {
    "ServeOptions": "forerun.serve.options",
    "create_app": "forerun.serve.app",
    "serve": "forerun.serve.run",
}

__all__ = ["ServeOptions", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forerun.serve' has no attribute {name!r}")
