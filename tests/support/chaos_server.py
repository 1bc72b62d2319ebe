"""An orchestrator and file store that fails in every way a network can; runs as a separate process.

Usage: ``python chaos_server.py DIRECTORY``; prints its port. ``POST /__control`` with JSON changes its behaviour,
``GET /__state`` lists accepted requests. A request is applied once per idempotency key, as by a real server.
"""

import asyncio
import hashlib
import json
import random
import socket
import struct
import sys
import time
import urllib.parse
from pathlib import Path

DEFAULTS = {
    "seed": 7,
    "rate": 0.0,
    "faults": [],
    "script": [],  # faults for the next requests, one each, before any dice; "ok" for none
    "script_paths": "",  # only requests whose path contains this follow the script
    "outage": False,
    "tokens": None,  # accepted tokens; None accepts all
    "stall_s": 3.0,
    "hold_at": None,  # from so many applied requests on nothing is applied, until this is changed
    "redirect_to": "",
    "retry_after": "0",
    "wrong_ref": False,
}
ALL_FAULTS = [
    *("500", "503", "429", "reset-before", "reset-mid-body", "reset-after", "stall"),
    *("half-close", "truncated", "slow-read", "duplicate", "wrong-digest", "garbage"),
]


class Reset(Exception):
    pass


class Door:
    """Leads a connection to the server that is there when it is made: those that a test leaves open stay with its."""

    def __init__(self, directory):
        self.server = Server(directory, self)

    async def serve(self, reader, writer):
        await self.server.serve(reader, writer)


class Server:
    def __init__(self, directory, door):
        self.door = door
        self.files = Path(directory) / "files"
        self.files.mkdir(parents=True, exist_ok=True)
        self.options = dict(DEFAULTS)
        self.dice = random.Random(self.options["seed"])
        self.answers = {}  # key -> answer
        self.applied = []  # applied requests, in order
        self.requests = []  # every request that was read

    async def serve(self, reader, writer):
        try:
            while await self.exchange(reader, writer):
                pass
        except Reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            writer.close()

    async def exchange(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        length = int(headers.get("content-length", 0))
        if path.startswith("/__"):
            return await self.control(path, await reader.readexactly(length), writer)
        request = {"method": method, "path": path, "key": headers.get("idempotency-key"), "headers": headers}
        request["fault"] = fault = self.pick_fault(path)
        self.requests.append(request)
        if self.options["outage"] or fault == "reset-before":
            raise Reset
        if fault == "early-401":
            await self.answer(writer, 401, {}, close=True)
            return False
        body = await self.read_body(reader, length, fault, request)
        return await self.respond(request, body, fault, writer)

    def pick_fault(self, path):
        script = self.options["script"]
        if script and self.options["script_paths"] in path:
            return script.pop(0)
        if self.options["faults"] and self.dice.random() < self.options["rate"]:
            return self.dice.choice(self.options["faults"])
        return "ok"

    async def read_body(self, reader, length, fault, request):
        body = bytearray()
        limit = length // 2 if fault == "reset-mid-body" else length
        while len(body) < limit:
            piece = await reader.read(min(limit - len(body), 4096 if fault == "slow-read" else 1 << 16))
            if not piece:
                raise ConnectionError
            body += piece
            if fault == "slow-read":
                await asyncio.sleep(0.0005)
        request["received"] = len(body)
        if fault == "reset-mid-body":
            raise Reset
        return bytes(body)

    async def respond(self, request, body, fault, writer):
        token = request["headers"].get("authorization", "").removeprefix("Bearer ")
        if self.options["tokens"] is not None and token not in self.options["tokens"]:
            return await self.answer(writer, 401, {"error": f"expired: {token}"})
        if fault.isdigit():
            extra = f"Retry-After: {self.options['retry_after']}\r\n" if fault in ("429", "503") else ""
            return await self.answer(writer, int(fault), {"error": fault, "echo": token}, extra)
        if fault in ("301", "302", "307", "308") or self.options["redirect_to"]:
            code = int(fault) if fault.isdigit() else 307
            return await self.answer(writer, code, {}, f"Location: {self.options['redirect_to']}{request['path']}\r\n")
        if fault == "stall":
            await self.stall()
            raise Reset
        if fault == "garbage":
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>"
                if request["method"] == "PUT"
                else b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
            )
            await writer.drain()
            return True
        if fault == "wrong-digest" and request["method"] == "PUT":
            return await self.answer(writer, 200, {"ref": "?", "sha256": "0" * 64, "size_bytes": len(body)})
        if fault == "nulls" and request["method"] == "PUT":
            self.apply(request, body)
            return await self.answer(writer, 200, {"ref": None, "sha256": None, "size_bytes": None})
        if fault == "wrong-size" and request["method"] == "PUT":
            return await self.answer(writer, 200, {"ref": "?", "size_bytes": len(body) + 1})
        if fault == "huge":
            return await self.answer(writer, 200, {"ref": "x" * (2 << 20)})
        while self.options["hold_at"] is not None and len(self.applied) >= self.options["hold_at"]:
            await asyncio.sleep(0.01)
        reply = self.apply(request, body)
        if fault == "reset-after":
            raise Reset
        return await self.answer(writer, 200, reply, broken=fault)

    async def stall(self):
        """Wait as long as the options require; they may change meanwhile."""
        began = time.monotonic()
        while time.monotonic() - began < self.options["stall_s"]:
            await asyncio.sleep(0.01)

    def apply(self, request, body):
        key = request["key"]
        if key in self.answers:
            return self.answers[key]
        digest = hashlib.sha256(body).hexdigest()
        if request["method"] == "PUT":
            name = urllib.parse.unquote(request["path"].partition("?")[0].rpartition("/")[2])
            (self.files / name).write_bytes(body)
            reply = {"ref": f"ref-{name}", "sha256": digest, "size_bytes": len(body)}
            self.applied.append({"key": key, "file": name, "sha256": digest})
        else:
            reply = {}
            self.applied.append({"key": key, "path": request["path"].partition("?")[0], "body": json.loads(body)})
        self.answers[key] = reply
        return reply

    async def answer(self, writer, status, reply, extra="", broken="", close=False):
        content = json.dumps(reply).encode()
        head = f"HTTP/1.1 {status} X\r\n{extra}Content-Length: {len(content)}\r\n\r\n".encode()
        if broken == "half-close":
            writer.write(head[: len(head) // 2])
            writer.write_eof()
        elif broken == "truncated":
            writer.write(head + content[: len(content) // 2])
            writer.write_eof()
        elif broken == "duplicate":
            writer.write((head + content) * 2)
        else:
            writer.write(head + content)
        await writer.drain()
        return broken not in ("half-close", "truncated") and not close

    def change(self, options):
        if "seed" in options:
            self.dice = random.Random(options["seed"])
        if options.get("faults") == "all":
            options["faults"] = ALL_FAULTS
        self.options.update(options)

    async def control(self, path, body, writer):
        if path == "/__control":
            changes = json.loads(body)
            if "directory" in changes:
                self.door.server = Server(changes.pop("directory"), self.door)
            self.door.server.change(changes)
        if path == "/__count":
            return await self.answer(writer, 200, {"applied": len(self.applied)})
        state = {"applied": self.applied, "requests": self.requests}
        return await self.answer(writer, 200, state if path == "/__state" else {})


async def main(directory):
    server = await asyncio.start_server(Door(directory).serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
