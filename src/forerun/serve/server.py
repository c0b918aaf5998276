"""The state behind an application: the engine while it is there, and what keeps it going."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import forerun
from forerun.engine import AsyncEngine, Engine
from forerun.serve.engine_series import cache_counts
from forerun.serve.errors import unavailable
from forerun.serve.loglines import Levels, StatsLog
from forerun.serve.options import ServeOptions
from forerun.serve.service import Service
from forerun.target.dtypes import dtype_name

logger = logging.getLogger("forerun.serve")

LOADER = "forerun-load"
"""Name of the thread that loads the model."""


class Server:
    """One server, from loading to the last request.

    Args:
        load: makes the engine; runs in a thread of its own.
        options: of the server.
        failed: told when `load` raises.
    """

    def __init__(self, load: Callable[[], Engine], options: ServeOptions, failed: Callable[[], None] = lambda: None):
        self.options = options
        self._load = load
        self._failed = failed
        self._service: Service | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.error: BaseException | None = None
        """Why there is no engine."""
        self.loading = False
        self.address: tuple[str, int] | None = None
        """Host and port it listens at; None: the application is served by somebody else."""

    @property
    def ready(self) -> bool:
        return self._service is not None and not self._service.gate.draining

    @property
    def service(self) -> Service:
        """ApiError: 503 while there is none."""
        if self._service is None:
            raise unavailable("the model is still loading")
        return self._service

    async def start(self) -> None:
        """Begins to load."""
        self._tasks.append(asyncio.create_task(self._open()))

    async def _open(self) -> None:
        start = time.monotonic()
        # A thread that ends: OpenMP keeps workers for every thread that has computed, and where there are more of them
        # than cores they sleep instead of waiting awake (measured: the engine's passes then take 2.6 times as long).
        loader = ThreadPoolExecutor(1, LOADER)
        self.loading = True
        try:
            self._service = await asyncio.get_running_loop().run_in_executor(loader, self._make)
        except Exception as error:
            self.error = error
            self._failed()
            return
        finally:
            loader.shutdown(wait=False)
        if not self.options.disable_log_stats:
            log = StatsLog(self._service.metrics, self.levels)
            self._tasks.append(asyncio.create_task(log.run(self.options.log_stats_interval)))
        logger.info("ready after %.1f s: %s", time.monotonic() - start, ", ".join(self._service.names))

    def _make(self) -> Service:
        try:
            engine = AsyncEngine(self._load())
            try:
                return Service(engine, self.options)
            except BaseException:
                asyncio.run(engine.close())
                raise
        finally:
            self.loading = False

    def levels(self) -> Levels:
        """How full the engine is, as it is this moment."""
        engine = self.service.engine.engine
        core, cache = engine.core, cache_counts(engine)
        running, waiting = len(core.admission.running), len(core.admission.waiting)
        used = core.pool.used / core.pool.num_blocks
        return Levels(running, waiting, used, *cache, core.schedule.predicted_gain)

    async def drain(self) -> None:
        """Lets the requests inside finish, as long as that is allowed to take."""
        if self._service is not None:
            await self._service.gate.drain(self.options.drain_timeout)

    def hurry(self) -> None:
        """Ends the requests inside now, as the end of the time to drain would."""
        if self._service is not None:
            self._service.gate.close()

    async def stop(self) -> None:
        """Ends everything."""
        await self.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._service is not None:
            await self._service.engine.close()
            self._service.close()


async def until_ready(server: Server, seconds: float = 600.0) -> Server:
    """Waits for the model, for tests and embedders; raises what loading raised."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not server.ready and server.error is None:
                await asyncio.sleep(0.01)
    if server.error is not None:
        raise server.error
    return server


def info(server: Server) -> dict[str, Any]:
    """The document of /server_info."""
    service = server.service
    engine, core = service.engine.engine, service.engine.engine.core
    totals = service.metrics.totals
    found: dict[str, Any] = {
        "version": forerun.__version__,
        "model": service.target.name,
        "served_model_names": list(service.names),
        "system_fingerprint": service.fingerprint,
        "max_model_len": service.target.window,
        "chat_template": service.prompts.tokenizer.chat_template is not None,
        "dtype": dtype_name(service.target.dtype),
        "device": str(service.target.device),
        "verify_mode": service.verify_mode,
        "engine": {
            "max_num_seqs": engine.options.max_num_seqs,
            "max_num_batched_tokens": engine.options.max_num_batched_tokens,
            "kv_blocks": core.pool.num_blocks,
            "enable_prefix_caching": core.prefix_cache.enabled,
        },
        "sampling_defaults": service.parameters.defaults,
        "logprobs_mode": service.options.logprobs_mode,
        "tool_call_parser": service.tools.parser,
        "speculative_config": [
            {"name": entry.name, "label": entry.label, **entry.config.model_dump(exclude_unset=True)}
            for entry in service.loaded
        ],
        "num_speculative_tokens": service.most_drafted,
        "drafting": totals.as_dict(),
    }
    if totals.mean_accepted_length is not None:
        found["avg_spec_accept_length"] = totals.mean_accepted_length  # SGLang's name
    return found


__all__ = ["Server", "info", "until_ready"]
