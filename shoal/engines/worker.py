"""The worker: one serve loop for all engines. Imports NumPy and whatever its tasks import; never JAX."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

from shoal import errors
from shoal.base.lifetime import die_with_parent
from shoal.engines import wire
from shoal.engines.fingerprint import fingerprint
from shoal.engines.functions import Functions, trust
from shoal.engines.wire import PREFIX, Kind, Message


class Server:
    """Runs tasks and keeps shared values. `handle` takes one message and returns the reply, if there is one."""

    def __init__(self, allow: Collection[str] | None = (), main: str | None = None) -> None:
        self.functions = Functions(allow, main)
        self.shared: dict[int, Any] = {}

    def handle(self, message: Message) -> Message | None:
        """Act on one message from the head."""
        if message.kind == Kind.TASK:
            return self._run(message)
        if message.kind == Kind.SHARE:
            self.shared[message.number] = wire.decode(message.frame)
        elif message.kind == Kind.FORGET:
            self.shared.pop(message.number, None)
        elif message.kind == Kind.WELCOME:
            settings = wire.decode(message.frame)
            sys.path[:] = settings["path"]
            self.functions = Functions(settings["allow"], settings["main"], settings.get("source"))
            trust(settings["allow"])
        else:
            raise errors.WireError(f"a worker got a message of kind {message.kind}, which only heads get")
        return None

    def _run(self, message: Message) -> Message:
        begun = time.perf_counter()
        try:
            name, args = wire.decode(message.frame, self.shared)
            result = self.functions.find(name)(*args)
            body = {"seconds": time.perf_counter() - begun, "result": result}
            return Message(Kind.DONE, message.number, wire.encode(body, f"what {name} returned"))
        except (KeyboardInterrupt, errors.Stopped):  # in the head's own process: not the task's doing
            raise
        except BaseException as error:  # whatever a task raises is the head's to report
            body = {"seconds": time.perf_counter() - begun, **describe(error)}
            return Message(Kind.FAILED, message.number, wire.encode(body))


def describe(error: BaseException) -> dict[str, str]:
    """What is told of a task that raised."""
    # Frames of the serve loop say nothing to the user, so the traceback starts where the task does.
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    trace = "".join(traceback.format_exception(type(error), error, below))
    texts = {"type": type(error).__name__, "message": str(error), "traceback": trace}
    # File names that are not UTF-8 get into messages as lone surrogates, which no wire takes.
    return {key: text.encode("utf-8", "backslashreplace").decode() for key, text in texts.items()}


def failure(body: dict[str, Any], what: str) -> errors.ShoalError:
    """The exception for the caller from what a worker said of a task that raised."""
    kind = getattr(errors, body["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.ShoalError) and kind is not errors.TaskFailed:
        return kind(body["message"])
    return errors.TaskFailed(f"{what} raised {body['type']}: {body['message']}", body["traceback"])


def serve(server: Server, receive: Callable[[], Message | None], send: Callable[[Message], None]) -> None:
    """Answer messages until the head is gone."""
    send(Message(Kind.HELLO, 0, wire.encode(fingerprint())))
    while (message := receive()) is not None:
        reply = server.handle(message)
        if reply is not None:
            send(reply)


class SocketChannel:
    """Blocking messages over a stream socket, for the worker's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def receive(self) -> Message | None:
        """The next message, or None when the head has closed or died."""
        prefix = self._exactly(PREFIX.size)
        if prefix is None:
            return None
        kind, number, size = PREFIX.unpack(prefix)
        if size > wire.MAX_FRAME:
            raise errors.WireError(f"a message of {size:,} bytes was announced; the limit is {wire.MAX_FRAME:,}")
        frame = self._exactly(size)
        return None if frame is None else Message(kind, number, frame)

    def _exactly(self, size: int) -> bytearray | None:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError:
                return None
            if count == 0:
                return None
            view = view[count:]
        return buffer

    def send(self, message: Message) -> None:
        """Send one message whole."""
        self._socket.sendall(PREFIX.pack(message.kind, message.number, len(message.frame)))
        self._socket.sendall(message.frame)


def main() -> None:
    """Serve over the inherited socket whose number and the head's process id are the arguments."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the head, which closes its workers
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = SocketChannel(connection)
    with contextlib.suppress(BrokenPipeError):  # the head closed while a result was on its way
        serve(Server(), channel.receive, channel.send)


if __name__ == "__main__":
    main()
