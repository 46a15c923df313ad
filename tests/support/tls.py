"""A certificate for tests, of 127.0.0.1 and nothing else, signed by itself; and another one, whose key is lost."""

import ssl
from pathlib import Path

HERE = Path(__file__).parent
CERTIFICATE = HERE / "tls_certificate.pem"
FOREIGN = HERE / "tls_foreign.pem"
KEY = HERE / "tls_key.pem"


def refused(alert: str = ".*") -> str:
    """A pattern for the words of a client whose handshake the server refuses.

    A client of TLS 1.3 writes before it has read the alert. Then the end of the connection may overtake the alert.
    """
    return f"(the server refuses the handshake of TLS: {alert}|.*(reset|broken pipe|closed|lost|EOF).*)"


def server_context() -> ssl.SSLContext:
    """What a server needs to speak TLS with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context
