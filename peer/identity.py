"""A peer's identity, and the certificates that prove its membership in the cluster.

The identity is an Ed25519 key on disk; the 160-bit id is a hash of its public half. The cluster key
is all that a machine needs to join: from it, every peer derives the same certificate authority and
signs its own certificate, so TLS proves both the membership and the id. Secrets are files of mode
0600.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

# The authority's certificate must be the same bytes on every peer: fixed dates and serial number.
_FROM = datetime.datetime(2020, 1, 1)
_UNTIL = datetime.datetime(2120, 1, 1)
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "valence cluster")])


def derive(cluster_key: str, purpose: bytes, length: int = 32) -> bytes:
    hkdf = HKDF(hashes.SHA256(), length, salt=b"valence 1", info=purpose)
    return hkdf.derive(cluster_key.encode())


def peer_id(public: Ed25519PublicKey) -> bytes:
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).digest()[:20]


def write_private(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; from its first byte, only its owner can read it."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer's key, and the id that follows from it."""

    id: bytes
    key: Ed25519PrivateKey

    @classmethod
    def load(cls, directory: Path) -> Identity:
        """The key in the directory, made at the first start."""
        path = directory / "identity.pem"
        if path.exists():
            key = serialization.load_pem_private_key(path.read_bytes(), None)
            if not isinstance(key, Ed25519PrivateKey):
                raise ValueError(
                    f"{path} is no Ed25519 key (restore it, or remove it to start as a new peer)"
                )
            path.chmod(0o600)
        else:
            key = Ed25519PrivateKey.generate()
            write_private(
                path,
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                ),
            )
        return cls(peer_id(key.public_key()), key)


def _certificate(
    subject: x509.Name, key: Ed25519PublicKey, authority: Ed25519PrivateKey, serial: int, ca: bool
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    return builder.sign(authority, None)


@dataclass(frozen=True, slots=True)
class TlsContexts:
    server: ssl.SSLContext
    client: ssl.SSLContext


def tls_contexts(identity: Identity, cluster_key: str, directory: Path) -> TlsContexts:
    """Both sides must show a certificate of the cluster's authority; others can't send a byte."""
    authority = Ed25519PrivateKey.from_private_bytes(derive(cluster_key, b"authority"))
    root = _certificate(_AUTHORITY, authority.public_key(), authority, 1, ca=True)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.id.hex())])
    serial = int.from_bytes(identity.id[:16], "big") >> 1 or 2
    own = _certificate(name, identity.key.public_key(), authority, serial, ca=False)
    pem = serialization.Encoding.PEM
    private = identity.key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = directory / "tls.pem"  # the ssl module reads keys from files only
    write_private(path, private + own.public_bytes(pem))
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=root.public_bytes(pem).decode())
        context.load_cert_chain(path)
        contexts.append(context)
    return TlsContexts(*contexts)


def id_of_certificate(der: bytes) -> bytes:
    key = x509.load_der_x509_certificate(der).public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("not an Ed25519 certificate")
    return peer_id(key)
