"""A TCP proxy that can swallow everything, as a firewall or a pulled cable does."""

import contextlib
import selectors
import socket
import threading


class Proxy:
    """Forwards connections to a port of the loopback; while `hole` is set, bytes go nowhere and nobody is told."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.hole = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def _forward(self) -> None:
        selector = selectors.DefaultSelector()
        ends = [self._server]
        selector.register(self._server, selectors.EVENT_READ, None)
        while not self._closed.is_set():
            for key, _ in selector.select(0.02):
                if key.fileobj is self._server:
                    inner, _ = self._server.accept()
                    outer = socket.create_connection(("127.0.0.1", self._upstream))
                    ends += [inner, outer]
                    selector.register(inner, selectors.EVENT_READ, outer)
                    selector.register(outer, selectors.EVENT_READ, inner)
                    continue
                content = b""
                with contextlib.suppress(OSError):
                    content = key.fileobj.recv(65536)  # type: ignore[union-attr]
                if self.hole.is_set() and content:
                    continue
                with contextlib.suppress(OSError):
                    if content:
                        key.data.sendall(content)
                        continue
                    key.data.shutdown(socket.SHUT_WR)
                selector.unregister(key.fileobj)
        for end in ends:
            end.close()
        selector.close()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
