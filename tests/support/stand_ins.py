"""Programs that stand in for servers which cannot be asked to behave like that."""

import socket
import threading
from typing import Self


class StandIn:
    """Listens on a port of its own; `serve` speaks with one client, and after that with the next one."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        # shutdown, because a close alone does not wake the thread that accepts.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self.serve(client)

    def serve(self, client: socket.socket) -> None:
        """Speak with a client."""
        raise NotImplementedError


class Eavesdropper(StandIn):
    """A server without TLS, which keeps what it is told. `answer`: to whatever it is told."""

    def __init__(self, greeting: bytes = b"", *, answer: bytes = b"") -> None:
        super().__init__()
        self._greeting, self._answer = greeting, answer
        self.heard = b""

    def serve(self, client: socket.socket) -> None:
        """Listen to the end."""
        with client:
            client.sendall(self._greeting)
            while data := client.recv(4096):
                self.heard += data
                client.sendall(self._answer)
