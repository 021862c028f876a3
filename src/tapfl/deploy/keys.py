"""Keys of a federation: a certificate authority, the server's certificate, a key for each node.

Nodes know the server by a certificate that the authority signed; the server knows a node by its
public key. Whoever has ``ca.key`` can pretend to be the server, so it belongs on no machine that is
connected; a node needs ``ca.pem`` and its own key alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tapfl.errors import TapflError, as_tapfl_error
from tapfl.tasks import check_name

DAYS = 825  # the longest that clients of TLS commonly accept
LOOPBACK = ("localhost", "127.0.0.1")


def make_keys(folder: Path, hosts: Sequence[str], nodes: Sequence[str]) -> list[Path]:
    """Make what is missing: the authority and the server's certificate once, and nodes' keys.

    Return the files that were made. Nothing that is there is replaced.
    """
    for node in nodes:
        check_name(node, "node")
    made: list[Path] = []
    with as_tapfl_error(f"{folder}: cannot make keys"):
        (folder / "nodes").mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not (folder / "server.pem").is_file():
            made += _certificates(folder, [*dict.fromkeys([*LOOPBACK, *hosts])])
        elif hosts:
            raise TapflError(f"{folder / 'server.pem'} is there already; remove it and server.key "
                             "to make one for other hosts")
        for node in nodes:
            if not (folder / "nodes" / f"{node}.key").exists():
                made += _node_key(folder / "nodes", node)
    return made


def _certificates(folder: Path, hosts: Sequence[str]) -> list[Path]:
    authority = folder / "ca.key"
    made = []
    if authority.is_file():
        ca_key, ca = _load(authority), x509.load_pem_x509_certificate(
            (folder / "ca.pem").read_bytes())
    else:
        ca_key = _new_key()
        ca = _certificate("tapfl federation", ca_key, None, ca_key)
        made += [_write(authority, _pem(ca_key), secret=True),
                 _write(folder / "ca.pem", _pem_certificate(ca))]
    key = _new_key()
    server = _certificate(hosts[0], key, ca, ca_key, hosts)
    return [*made, _write(folder / "server.key", _pem(key), secret=True),
            _write(folder / "server.pem", _pem_certificate(server))]


def _certificate(name: str, key: Any, issuer: Any, issuer_key: Any,
                 hosts: Sequence[str] = ()) -> Any:
    """Return a certificate; without an issuer it is an authority's own."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    builder = (x509.CertificateBuilder().subject_name(subject)
               .issuer_name(issuer.subject if issuer else subject)
               .public_key(key.public_key()).serial_number(x509.random_serial_number())
               .not_valid_before(now - datetime.timedelta(hours=1))
               .not_valid_after(now + datetime.timedelta(days=DAYS))
               .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), True)
               .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
               .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(
                   issuer_key.public_key()), False))
    if issuer is None:
        builder = builder.add_extension(x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
            encipher_only=False, decipher_only=False), True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName(
            [_host(host) for host in hosts]), False).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    return builder.sign(issuer_key, hashes.SHA384())


def _host(host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _node_key(folder: Path, node: str) -> list[Path]:
    """Make a node's key in OpenSSH's format, which Flower reads."""
    key = _new_key()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH,
                                serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH,
                                           serialization.PublicFormat.OpenSSH)
    return [_write(folder / f"{node}.key", private, secret=True),
            _write(folder / f"{node}.pub", public + f" {node}\n".encode())]


def _new_key() -> Any:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: Any) -> bytes:
    data: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                    serialization.NoEncryption())
    return data


def _pem_certificate(certificate: Any) -> bytes:
    data: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return data


def _load(path: Path) -> Any:
    return serialization.load_pem_private_key(path.read_bytes(), None)


def _write(path: Path, data: bytes, secret: bool = False) -> Path:
    mode = 0o600 if secret else 0o644
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123
        file.write(data)
    return path
