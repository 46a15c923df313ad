"""A certificate for tests, of 127.0.0.1 and nothing else, signed by itself; and another one, whose key is lost."""

import ssl
from pathlib import Path

HERE = Path(__file__).parent
CERTIFICATE = HERE / "tls_certificate.pem"
FOREIGN = HERE / "tls_foreign.pem"
KEY = HERE / "tls_key.pem"


def server_context() -> ssl.SSLContext:
    """What a server needs to speak TLS with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context
