"""An authority that issues certificates for tests, by the program `openssl`; the files as the options of a URL."""

import subprocess
from pathlib import Path
from urllib.parse import urlencode

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj")


class Authority:
    """Signs certificates. Its own certificate is `ca`, all lie in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.ca = folder / "ca.pem"
        _run("req", "-x509", "-days", "2", *_KEY, "/CN=authority", "-out", self.ca, "-keyout", folder / "ca.key")

    def issue(self, name: str, days: int = 2, *, host: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """Make a certificate of a name, and its key; return the paths. With `days=-1` it has expired yesterday.

        It is good for a server on the host, too.
        """
        paths = request, key, certificate = [self._folder / f"{name}.{end}" for end in ("csr", "key", "pem")]
        _run("req", *_KEY, f"/CN={name}", "-addext", f"subjectAltName={host}", "-out", request, "-keyout", key)
        by: list[str | Path] = [
            "-CA",
            self.ca,
            "-CAkey",
            self._folder / "ca.key",
            "-CAcreateserial",
            "-copy_extensions",
            "copy",
        ]
        _run("x509", "-req", "-in", request, *by, "-days", str(days), "-out", certificate)
        return paths[2], paths[1]


def options(*, ca: Path | None = None, shown: tuple[Path, Path] | None = None) -> str:
    """Return the options of a URL: the authority to trust, and the certificate to show."""
    cert, key = shown or (None, None)
    given = {"ca": ca, "cert": cert, "key": key}
    return urlencode({name: path for name, path in given.items() if path is not None}, safe="/")


def locked(key: Path, passphrase: str) -> Path:
    """Return the path of a copy of a key that wants a passphrase."""
    path = key.with_suffix(".locked")
    _run("pkcs8", "-topk8", "-in", key, "-passout", f"pass:{passphrase}", "-out", path)
    return path


def _run(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
