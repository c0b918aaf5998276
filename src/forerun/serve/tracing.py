"""OpenTelemetry: one span for each request, written when it is over. Needs the extra `otel`."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from forerun.errors import OptionError, not_imported
from forerun.serve.account import Account
from forerun.serve.parameters import Ask


class Tracer:
    """Writes spans; without an exporter it does nothing."""

    def __init__(self, tracer: Any = None, extract: Any = None):
        self._tracer = tracer
        self._extract = extract

    @classmethod
    def to(cls, endpoint: str) -> Tracer:
        """A tracer that sends to an OTLP collector. OptionError: it is no URL, or the packages are missing."""
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.propagate import extract
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise OptionError("--otlp-traces-endpoint", not_imported(error, "otel", "opentelemetry")) from error
        provider = TracerProvider(resource=Resource.create({"service.name": "forerun"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        return cls(provider.get_tracer("forerun.serve"), extract)

    def record(self, account: Account, ask: Ask, arrival: Any, model: str) -> None:
        """The span of a request that is over; attributes have vLLM's names."""
        if self._tracer is None:
            return
        now, clock = time.time_ns(), time.perf_counter()
        begun = now - int(1e9 * (clock - account.arrived))
        context = self._extract(arrival.trace) if self._extract is not None else None
        span = self._tracer.start_span("llm_request", context=context, start_time=begun)
        for name, value in attributes(account, ask, arrival.id, model).items():
            if value is not None:
                span.set_attribute(name, value)
        span.end(now)


def traces_url(endpoint: str) -> str:
    """Where spans are posted to: OTLP over HTTP has a path of its own for them, which an address alone leaves out."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(
            "--otlp-traces-endpoint", f"must be http://HOST:4318, got {endpoint!r}; spans travel over HTTP"
        )
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def attributes(account: Account, ask: Ask, request_id: str, model: str) -> dict[str, Any]:
    """What a span says; a value that is not known is None."""
    sampling, only = ask.samplings[0], account.only()
    found: dict[str, Any] = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.n": sampling.n,
        "gen_ai.usage.prompt_tokens": sum(account.prompts),
        "gen_ai.usage.completion_tokens": account.completion_tokens,
    }
    if only is not None and only.first is not None and only.last is not None and only.started is not None:
        found["gen_ai.latency.time_in_queue"] = only.started - account.arrived
        found["gen_ai.latency.time_to_first_token"] = only.first - account.arrived
        found["gen_ai.latency.e2e"] = only.last - account.arrived
        found["forerun.spec_decode.verified"] = sum(verified for verified, _ in only.steps)
        found["forerun.spec_decode.accepted"] = sum(accepted for _, accepted in only.steps)
    return found


no_tracer = Tracer()

__all__ = ["Tracer", "attributes", "no_tracer", "traces_url"]
