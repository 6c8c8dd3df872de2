"""What a run costs as ranks are added: requests and bytes of the store, messages of rank 0, its memory; by phase.

    python benchmarks/scale.py ranks [--sizes 2,4,8,16] [--json FILE]
    python benchmarks/scale.py stand-ins [--sizes 16,64,256,512] [--json FILE]

``ranks``: real ranks train a small task under torchrun's variables. Each reaches the store through a proxy that counts
the requests of its wire protocol, by purpose; calls of ``torch.distributed`` are counted in rank 0, by its activity.

``stand-ins``: rank 0 is real and meets processes without torch, which send what a rank sends. Then they send heartbeats
for some seconds, and read those of all ranks, as ranks do in a hang. ``all-read-all``: the meeting as it was until
2026-11-28, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import json
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
TASK = """
from pathlib import Path
import lockstep
import torch
from torch import nn
from lockstep import ArrayDataset, Datasets, Loss, Task

class Small(Task):
    defaults = {"training.epochs": 2, "training.global_batch_size": 256}

    def datasets(self):
        inputs = torch.linspace(-1, 1, 4096 * 16).reshape(4096, 16)
        data = ArrayDataset(inputs, inputs.sum(1, keepdim=True))
        return Datasets(data, data)

    def hooks(self):
        return [(self.count_sockets, 8)]

    def count_sockets(self, result, model):
        if lockstep.collectives().is_main:
            sockets = [link for link in Path("/proc/self/fd").iterdir() if link.is_socket()]
            Path("sockets.json").write_text(str(len(sockets)))

    def model(self):
        return nn.Linear(16, 1)

    def loss(self, model, batch):
        return Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))
"""
#: TCPStoreBackend.hpp of torch 2.13. Values: how many (keys, values, eight-byte numbers) follow; None: a list.
SET, COMPARE_SET, GET, ADD, CHECK, WAIT, DELETE, APPEND, MULTI_GET, MULTI_SET, PING = 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 13
FIXED_TEXTS = {SET: 2, COMPARE_SET: 3, GET: 1, ADD: 1, DELETE: 1, APPEND: 2}
LISTS = {CHECK: 1, WAIT: 1, MULTI_GET: 1, MULTI_SET: 2}
VALIDATE, MAGIC = 0, 0x3C85F7CE
#: Most ranks for which the meeting of N² requests is tried.
ALL_READ_ALL = 256


def purpose(key: str) -> str:
    """What a key of the store is for."""
    for part, name in (
        ("lockstep/settings", "meeting"),
        ("lockstep/member", "meeting"),
        ("lockstep/verdict", "meeting"),
        ("lockstep/watchdog", "heartbeats"),
        ("call of rank", "checked calls"),
    ):
        if part in key:
            return name
    return "process groups"


# The proxy.


class Proxy:
    """Forwards connections of one rank to the store at ``port``; counts requests and bytes, by purpose."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.requests: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.address = 0

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26)
        self.address = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_store, to_store = await asyncio.open_connection("127.0.0.1", self._port)
        latest = ["process groups"]

        async def answers() -> None:
            while data := await from_store.read(1 << 16):
                self.bytes[latest[0]] += len(data)
                writer.write(data)

        task = asyncio.ensure_future(answers())
        try:
            while True:
                message, key = await request(reader)
                latest[0] = purpose(key)
                self.requests[latest[0]] += 1
                self.bytes[latest[0]] += len(message)
                to_store.write(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            to_store.close()
            task.cancel()


async def request(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """The next request of a client of torch's TCPStore, and its first key."""
    message = bytearray(await reader.readexactly(1))
    kind = message[0]
    key = ""

    async def text() -> bytes:
        head = await reader.readexactly(8)
        body = await reader.readexactly(*struct.unpack("=Q", head))
        message.extend(head + body)
        return body

    if kind in (VALIDATE, PING):
        message += await reader.readexactly(4)
    elif kind in FIXED_TEXTS:
        for number in range(FIXED_TEXTS[kind]):
            body = await text()
            key = key if number else body.decode()
        if kind == ADD:
            message += await reader.readexactly(8)
    elif kind in LISTS:
        head = await reader.readexactly(8)
        message += head
        for number in range(struct.unpack("=Q", head)[0] * LISTS[kind]):
            body = await text()
            key = key if number else body.decode()
    return bytes(message), key


# Real ranks.


def measure_ranks(size: int) -> dict[str, Any]:
    """Train with ``size`` ranks, which meet at a store of this process's child."""
    with tempfile.TemporaryDirectory() as folder, StoreServer(size) as port:
        (Path(folder) / "small.py").write_text(TASK)
        proxies = [Proxy(port) for _ in range(size)]
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        for proxy in proxies:
            asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
        ranks = []
        began = time.monotonic()
        for rank, proxy in enumerate(proxies):
            variables = {
                **{"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": proxy.address, "TORCHELASTIC_USE_AGENT_STORE": True},
                "OMP_NUM_THREADS": 1,
            }
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            command = [sys.executable, str(HERE), "rank"]
            ranks.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), codes
        seconds = time.monotonic() - began
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        of_rank_0 = json.loads((Path(folder) / "rank-0.json").read_text())
        of_rank_0["sockets"] = json.loads((Path(folder) / "sockets.json").read_text())
        files = [Path(folder) / "run" / name for name in ("steps.jsonl", "ranks.jsonl")]
        row_bytes = {file.name: len(file.read_bytes().splitlines()[-1]) for file in files}
    per_rank = [proxies[0], max(proxies[1:], key=lambda proxy: sum(proxy.requests.values()))]
    purposes = sorted({name for proxy in proxies for name in proxy.requests})
    return {
        "ranks": size,
        "seconds": round(seconds, 1),
        "store": {
            name: {
                "requests": sum(proxy.requests[name] for proxy in proxies),
                "bytes": sum(proxy.bytes[name] for proxy in proxies),
                "requests_of_rank_0": per_rank[0].requests[name],
                "requests_of_another": per_rank[1].requests[name],
            }
            for name in purposes
        },
        "row_bytes": row_bytes,
        **of_rank_0,
    }


def run_rank() -> None:
    """Train as one rank; rank 0 writes down its calls of ``torch.distributed`` by activity, and its memory."""
    import torch.distributed as dist

    from lockstep.cli.main import main
    from lockstep.rundir.heartbeat import pulse

    calls: collections.Counter[str] = collections.Counter()

    def counted(name: str) -> None:
        function = getattr(dist, name)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[f"{pulse.sign.activity.name.lower()}: {name}"] += 1
            return function(*arguments, **keywords)

        setattr(dist, name, call)

    for name in ("send", "recv", "broadcast", "all_reduce", "all_gather", "all_gather_object", "barrier", "new_group"):
        counted(name)
    pulse.is_watched = True
    code = main(["train", "small.py:Small", "--save-dir", "run", "--devices", "cpu", "--log-interval", "4"])
    if os.environ["RANK"] == "0":
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path("rank-0.json").write_text(json.dumps({"calls": dict(sorted(calls.items())), "memory": memory}))
    sys.exit(code)


# Stand-ins.


class Client:
    """A client of torch's TCPStore without torch. The store's clients begin each key with a slash."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(struct.pack("=BI", VALIDATE, MAGIC))
        self.requests = self.bytes = 0

    def set(self, key: str, value: bytes) -> None:
        self._send(bytes([SET]) + text(b"/" + key.encode()) + text(value))

    def get(self, key: str) -> bytes:
        """Wait for ``key``; its value."""
        self._send(bytes([WAIT]) + struct.pack("=Q", 1) + text(b"/" + key.encode()))
        self._receive(1)
        self._send(bytes([GET]) + text(b"/" + key.encode()))
        return self._text()

    def check(self, *keys: str) -> bool:
        self._send(bytes([CHECK]) + struct.pack("=Q", len(keys)) + names(keys))
        return self._receive(1) == b"\0"

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._send(bytes([MULTI_GET]) + struct.pack("=Q", len(keys)) + names(keys))
        return [self._text() for _ in keys]

    def _send(self, message: bytes) -> None:
        self.requests += 1
        self.bytes += len(message)
        self._socket.sendall(message)

    def _text(self) -> bytes:
        (size,) = struct.unpack("=Q", self._receive(8))
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the store is gone")
            data += part
        self.bytes += size
        return bytes(data)


def text(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def names(keys: Sequence[str]) -> bytes:
    return b"".join(text(b"/" + key.encode()) for key in keys)


def measure_stand_ins(size: int, seconds: float) -> dict[str, Any]:
    """Rank 0 of ``size`` meets stand-ins, which then send heartbeats for ``seconds`` and read those of all ranks."""
    report: dict[str, Any] = {"ranks": size}
    for name in ("meeting", "all-read-all") if size <= ALL_READ_ALL else ("meeting",):
        with StoreServer(size, name) as port:
            report[name] = summary(stand_ins(size, port, functools.partial(meet, protocol=name)))
    with StoreServer(size) as port:
        report["heartbeats"] = summary(stand_ins(size, port, functools.partial(beat, seconds=seconds)))
    return report


def meet(client: Client, rank: int, size: int, protocol: str) -> dict[str, float]:
    began = time.monotonic()
    if protocol == "meeting":
        client.set(f"training-0/lockstep/settings/{rank}", SETTINGS)
        assert client.get("training-0/lockstep/verdict") == b"null"
    else:
        client.set(f"training-0/lockstep/member/{rank}", SETTINGS)
        for other in range(1, size):
            client.get(f"training-0/lockstep/member/{other}")
    return {"seconds": time.monotonic() - began}


def beat(client: Client, rank: int, size: int, seconds: float) -> dict[str, float]:
    """As the thread of ``launch/failure/watchdog.py`` with the default ``hang_timeout_s``."""
    keys = [f"lockstep/watchdog/{other}" for other in range(1, size)]
    client.set(keys[rank - 1], HEARTBEAT)
    client.get(keys[-1])
    waits = []
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        time.sleep(0.5)
        began = time.monotonic()
        client.check("lockstep/watchdog/asked")
        if number % 4 == 0:
            client.set(keys[rank - 1], HEARTBEAT)
        number += 1
        waits.append(time.monotonic() - began)
    requests, sent = client.requests, client.bytes
    began = time.monotonic()
    while not client.check(*keys):
        time.sleep(0.1)
    client.multi_get(keys)
    hang_s = time.monotonic() - began
    return {
        "seconds": statistics.median(waits),
        "requests_per_s": requests / seconds,
        "bytes_per_s": sent / seconds,
        "hang_s": hang_s,
        "hang_bytes": client.bytes - sent,
    }


#: As long as those of a rank of the ``har`` task.
SETTINGS = json.dumps(["node", {f"setting section.name_{number:03}": "value" for number in range(190)}]).encode()
HEARTBEAT = json.dumps({"number": 1, "untimed": False, "at": "x" * 350, "host": "node", "pid": 1}).encode()


def stand_ins(size: int, port: int, body: Any) -> list[dict[str, float]]:
    """Fork a process for each rank but 0; their results."""
    readers = []
    for rank in range(1, size):
        read, write = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                client = Client(port)
                result = body(client, rank, size)
                result |= {"requests": client.requests, "bytes": client.bytes}
                os.write(write, json.dumps(result).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        readers.append(read)
    results = []
    for read in readers:
        with os.fdopen(read) as file:
            results.append(json.loads(file.read()))
    for _ in readers:
        os.wait()
    return results


def summary(results: list[dict[str, float]]) -> dict[str, float]:
    """Sums of requests and bytes; the largest of the times."""
    sums = ("requests", "bytes", "requests_per_s", "bytes_per_s", "hang_bytes")
    columns = {name: [result[name] for result in results] for name in results[0]}
    return {name: round(sum(column) if name in sums else max(column), 4) for name, column in columns.items()}


# The store.


class StoreServer:
    """A process with the store; with ``protocol``, it is also rank 0 of a meeting of ``size`` ranks."""

    def __init__(self, size: int, protocol: str = "") -> None:
        command = [sys.executable, str(HERE), "store", str(size), protocol]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def serve(size: int, protocol: str) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    if protocol == "meeting":
        from lockstep.hardware.world import World
        from lockstep.launch.meeting.membership import Member, _refuse_differences

        host, compared = json.loads(SETTINGS)
        prefixed = dist.PrefixStore("training-0", store)
        _refuse_differences(prefixed, Member(0, 0, 0, host), World(0, size), compared)
    sys.stdin.read()


def tables(reports: list[dict[str, Any]]) -> Iterator[str]:
    """The reports as lines of Markdown."""
    for report in reports:
        values = {key: value for key, value in report.items() if key != "ranks"}
        yield f"- {report['ranks']} ranks: {json.dumps(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ranks", "stand-ins", "rank", "store"))
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--seconds", type=float, default=10.0, help="of heartbeats")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.part == "rank":
        run_rank()
    elif options.part == "store":
        serve(int(options.words[0]), *options.words[1:])
    else:
        is_real = options.part == "ranks"
        sizes = [int(size) for size in (options.sizes or ("2,4,8,16" if is_real else "16,64,256,512")).split(",")]
        reports = []
        for size in sizes:
            reports.append(measure_ranks(size) if is_real else measure_stand_ins(size, options.seconds))
            print(*tables(reports[-1:]), flush=True)
        if options.json is not None:
            from report import header, write_json

            command = " ".join(sys.argv)
            write_json(options.json, {**header(), "command": command, "part": options.part, "reports": reports})


if __name__ == "__main__":
    main()
