"""The worker: one serve loop for all engines. Imports NumPy and what its tasks import, but never JAX."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection

from shoal import errors
from shoal.base.lifetime import die_with_parent
from shoal.engines import wire
from shoal.engines.fingerprint import fingerprint
from shoal.engines.functions import Functions, trust
from shoal.engines.wire import PREFIX, DoneBody, ErrorBody, FailedBody, Kind, Message, WorkerSettings


class Server:
    """Runs tasks and keeps shared values. `handle` takes one message and returns the reply, if it needs one."""

    def __init__(self, allow: Collection[str] | None = ()) -> None:
        self.functions = Functions(allow)
        self.shared: dict[int, object] = {}

    def handle(self, message: Message) -> Message | None:
        """Act on one message from the head."""
        if message.kind == Kind.TASK:
            return self.run(message)
        if message.kind == Kind.SHARE:
            self.shared[message.number] = wire.decode(message.frame)
        elif message.kind == Kind.FORGET:
            self.shared.pop(message.number, None)
        elif message.kind == Kind.WELCOME:
            settings: WorkerSettings = wire.decode(message.frame)
            sys.path[:] = settings["path"]
            self.functions = Functions(settings["allow"], settings["main"], settings.get("source"))
            trust(settings["allow"])
        else:
            raise errors.WireError(f"a worker received a message of kind {message.kind}, which only heads receive")
        return None

    def run(self, task: Message) -> Message:
        """Run a task and return its reply: DONE, or FAILED if the task raised."""
        begun = time.perf_counter()
        try:
            name, args = wire.decode(task.frame, self.shared)
            result = self.functions.find(name)(*args)
            done: DoneBody = {"seconds": time.perf_counter() - begun, "result": result}
            return Message(Kind.DONE, task.number, wire.encode(done, f"what {name.partition('@')[0]} returned"))
        except (KeyboardInterrupt, errors.Stopped):  # only in the head's process, where the task is not the cause
            raise
        except BaseException as error:  # anything that a task raises is reported by the head
            failed: FailedBody = {"seconds": time.perf_counter() - begun, **describe_error(error)}
            return Message(Kind.FAILED, task.number, wire.encode(failed))


def describe_error(error: BaseException) -> ErrorBody:
    """Turn the error of a task into text for the head."""
    # The frame of `Server.run` says nothing to the user, so the traceback starts at the task.
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    trace = "".join(traceback.format_exception(type(error), error, below))
    return {"type": _sendable(type(error).__name__), "message": _sendable(str(error)), "traceback": _sendable(trace)}


def _sendable(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded: file names that are not UTF-8 bring them into messages."""
    return text.encode("utf-8", "backslashreplace").decode()


def rebuild_error(type_name: str, message: str, remote_traceback: str = "") -> errors.ShoalError | None:
    """Re-create one of Shoal's errors from the name of its class; None for any other class."""
    kind = vars(errors).get(type_name)
    if not (isinstance(kind, type) and issubclass(kind, errors.ShoalError)):
        return None
    return kind(message, remote_traceback) if issubclass(kind, errors.TaskFailed) else kind(message)


def task_error(body: ErrorBody, what: str) -> errors.ShoalError:
    """Build the exception that the caller of a task gets: Shoal's own errors as they are, others as `TaskFailed`."""
    # A task that itself waited for a failed task is one more level of failure.
    own = None if body["type"] == errors.TaskFailed.__name__ else rebuild_error(body["type"], body["message"])
    return own or errors.TaskFailed(f"{what} raised {body['type']}: {body['message']}", body["traceback"])


def serve(server: Server, receive: Callable[[], Message | None], send: Callable[[Message], None]) -> None:
    """Answer messages until the head is gone."""
    send(Message(Kind.HELLO, 0, wire.encode(fingerprint())))
    while (message := receive()) is not None:
        reply = server.run(message) if message.kind == Kind.TASK else server.handle(message)
        if reply is not None:
            send(reply)


class SocketChannel:
    """Blocking messages over a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def receive(self) -> Message | None:
        """Return the next message, or None once the other end has closed or died."""
        prefix = self._exactly(PREFIX.size)
        if prefix is None:
            return None
        kind, number, size = PREFIX.unpack(prefix)
        if size > wire.MAX_FRAME:
            raise errors.WireError(f"a message announces {size:,} bytes; the limit is {wire.MAX_FRAME:,}")
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
        """Send one message and wait until all of it is in the socket's buffer."""
        self._socket.sendall(PREFIX.pack(message.kind, message.number, len(message.frame)))
        self._socket.sendall(message.frame)


def main() -> None:
    """Serve over an inherited socket. Arguments: the socket's descriptor and the head's process id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the head, which closes its workers
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = SocketChannel(connection)
    with contextlib.suppress(BrokenPipeError):  # the head closed before it received a result
        serve(Server(), channel.receive, channel.send)


if __name__ == "__main__":
    main()
