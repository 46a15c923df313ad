"""A destination of one's own: messages are posted to a URL, and the answer says what becomes of them.

    export OUTBOX_DATABASE=sqlite:///shop.db
    python webhook.py http://localhost:8000/orders

It runs until SIGTERM or Ctrl-C.
"""

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from outbox import Done, Message, Outbox, Reject, Relay, Retry, Unavailable, Verdict, create_engine

_NOT_ITS_FAULT = (401, 403, 404, 408, 429, 502, 503, 504)


class Webhook:
    """Posts each message; a key whose message was refused is held back until that message is through."""

    def __init__(self, url: str) -> None:
        self.destination = url  # what the subscription remembers; no secrets
        self._url = url

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """One verdict per message, in their order; after the first of a key that is not `Done`, no later one is."""
        verdicts: list[Verdict] = []
        stopped: set[str] = set()
        for message in messages:
            waits = message.key in stopped
            verdict = Unavailable("an earlier message of its key is not through") if waits else self._post(message)
            if verdict != Done() and message.key is not None:
                stopped.add(message.key)
            verdicts.append(verdict)
        return verdicts

    def close(self) -> None:
        """Nothing is held between two calls."""

    def _post(self, message: Message) -> Verdict:
        headers = {"Idempotency-Key": str(message.message_id), "Content-Type": message.content_type or ""}
        request = urllib.request.Request(self._url, message.body, headers, method="POST")  # noqa: S310 - ours
        try:
            urllib.request.urlopen(request, timeout=2).close()  # noqa: S310 - ours
        except urllib.error.HTTPError as error:
            return _verdict(error)
        except OSError as error:
            return Unavailable(str(error))
        return Done()


def _verdict(error: urllib.error.HTTPError) -> Verdict:
    """Whose fault was it? Only what the message itself caused is counted against it."""
    if error.code in _NOT_ITS_FAULT:
        return Unavailable(str(error))
    return Reject(str(error)) if error.code < 500 else Retry(str(error))


if __name__ == "__main__":
    shop = Outbox(create_engine(os.environ.get("OUTBOX_DATABASE", "sqlite:///shop.db")))
    Relay(shop, Webhook(sys.argv[1]), name="webhook").run()
