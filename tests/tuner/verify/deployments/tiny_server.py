"""An OpenAI-compatible server of nothing: it streams words at a set pace, on the loopback alone.

    python tiny_server.py --port 30000 [--ttft 0.02] [--tpot 0.002] [--fail-every 0]
        [--health 200] [--die-after 0] [--say TEXT] [--key KEY]

Other arguments are let be, so that it can stand in for an engine. `--die-after N` ends it with
exit code 3 at request N; `--say` prints a line and ends with exit code 1 at once.
"""

import argparse
import asyncio
import json
import os
import sys
from asyncio import StreamReader, StreamWriter
from typing import Any

WORD = "the "


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ttft", type=float, default=0.02)
    parser.add_argument("--tpot", type=float, default=0.002)
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--health", type=int, default=200)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--say", default="")
    parser.add_argument("--key", default="")
    found, _ = parser.parse_known_args()
    return found


class Served:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.count = 0

    async def answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while await self.one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def one(self, reader: StreamReader, writer: StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in rest if ": " in line)
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        path = first.split()[1].split("?")[0]
        wanted = f"bearer {self.options.key}".lower() if self.options.key else ""
        if wanted and path.startswith("/v1/") and fields.get("authorization") != wanted:
            await reply(writer, 401, b'{"error": "Unauthorized"}')
            return True
        if path.startswith("/v1/") and first.startswith("POST"):
            await self.complete(path, json.loads(body), writer)
            return True
        status = self.options.health if path.startswith("/health") else 200
        known: dict[str, dict[str, Any]] = {
            "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model"}]},
            "/server_info": {"internal_states": [{}]},
        }
        await reply(writer, status, json.dumps(known.get(path, {})).encode())
        return True

    async def complete(self, path: str, requested: dict[str, Any], writer: StreamWriter) -> None:
        self.count += 1
        options = self.options
        if options.die_after and self.count >= options.die_after:
            sys.stderr.write("RuntimeError: the engine broke\n")
            os._exit(3)
        if options.fail_every and self.count % options.fail_every == 0:
            await reply(writer, 500, b'{"error": "broken"}')
            return
        tokens = requested.get("max_completion_tokens") or requested.get("max_tokens") or 8
        chat = "chat" in path
        head = {"id": "1", "object": "chat.completion.chunk" if chat else "text_completion"}
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for token in range(tokens):
            await asyncio.sleep(options.tpot if token else options.ttft)
            said = {"delta": {"content": WORD}} if chat else {"text": WORD}
            await event(writer, {**head, "choices": [{"index": 0, **said}]})
        if requested.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": prompt_tokens(requested), "completion_tokens": tokens}
            usage["total_tokens"] = sum(usage.values())
            await event(writer, {**head, "choices": [], "usage": usage})
        await chunk(writer, b"data: [DONE]\n\n")
        await chunk(writer, b"")


def prompt_tokens(requested: dict[str, Any]) -> int:
    prompt = requested.get("prompt", "")
    return len(prompt) if isinstance(prompt, list) else len(str(prompt).split())


async def event(writer: StreamWriter, value: dict[str, Any]) -> None:
    await chunk(writer, f"data: {json.dumps(value)}\n\n".encode())


async def chunk(writer: StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def reply(writer: StreamWriter, status: int, body: bytes) -> None:
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()


async def main() -> None:
    options = parsed()
    if options.say:
        sys.stderr.write(options.say + "\n")
        sys.exit(1)
    server = await asyncio.start_server(Served(options).answer, "127.0.0.1", options.port)
    async with server:
        await server.serve_forever()


asyncio.run(main())
