"""One request on a connection of its own, read byte for byte: what a client really gets, and nothing hidden."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from serve.kit import Reply


class Wire:
    """Like `Call`, over a socket. A reply of status 0: the server took no connection, or dropped it unanswered.

    `reads` is called before each part is read; `cut`: the body promises more than ever comes.
    """

    def __init__(self, url: str, path: str, body: bytes, headers: Mapping[str, str]):
        self.reply = Reply()
        self.cut = False
        self.reads: Callable[[], Coroutine[Any, Any, None]] | None = None
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._request = path, body, headers
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Closes the connection, whatever was read."""
        self._left.set()

    async def run(self) -> Reply:
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except OSError:
            return self.reply
        talking, leaving = asyncio.ensure_future(self._talk(reader, writer)), asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait({talking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if talking.done():
                talking.result()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the reply says how far it came
        finally:
            for task in (talking, leaving):
                task.cancel()
            await asyncio.gather(talking, leaving, return_exceptions=True)
            writer.transport.abort()
        return self.reply

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, body, headers = self._request
        own = {"host": "test", "connection": "close", "content-length": str(len(body) + self.cut), **headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        await self._head(reader)
        size = self.reply.headers.get("content-length")
        if size is not None:
            await self._part(await reader.readexactly(int(size)), more=False)
        while size is None:
            count = int((await reader.readuntil(b"\r\n")).strip(), 16)
            content = (await reader.readexactly(count + 2))[:-2]
            await self._part(content, more=count > 0)
            if count == 0:
                break
        if await reader.read():
            self.reply.starts += 1  # nothing may follow

    async def _head(self, reader: asyncio.StreamReader) -> None:
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        self.reply.starts += 1
        self.reply.status = int(status.split()[1])
        pairs = (line.partition(":") for line in lines)
        self.reply.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def _part(self, content: bytes, more: bool) -> None:
        if self.reads is not None:
            await self.reads()
        self.reply.parts.append(content)
        self.reply.more.append(more)
