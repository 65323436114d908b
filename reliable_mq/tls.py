"""TLS options, and the one place that builds an ``ssl.SSLContext``.

Invariants:

- The broker's certificate and host name are verified, unless the code sets ``verify=False``. That choice is logged as a
  warning at every connect. No URL can switch verification off.
- A driver gets a finished context, never TLS options: pika's URL options can switch verification off silently.
- Files are read at every connect, so the next connect uses a renewed certificate.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import check_flag, is_host
from reliable_mq.errors import ConfigurationError

__all__ = ["TLSOptions", "server_hostname"]

logger = get_logger(__name__)

FilePath = str | os.PathLike[str]

# The options that may be given beside a user's context, which has all the others itself.
_BESIDE_CONTEXT = frozenset({"context", "server_name", "verify"})
_MINIMUM_VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSOptions:
    """TLS options of a connection.

    Args:
        ca_file: A PEM file with the certificate authorities to trust. If any of the three ``ca_`` options is given,
            only the given authorities are trusted; otherwise the system's are.
        ca_path: A directory of such files, named by hash as OpenSSL requires.
        ca_data: The authorities themselves, as PEM text or DER bytes.
        cert_file: A PEM file with the client's certificate (mutual TLS), and with its key if `key_file` is not given.
        key_file: A PEM file with the client's private key.
        key_password: The password of that key, or a callable that returns it and is called at every connect.
        server_name: The name to send (SNI) and to verify, if it is not the host of the URL.
        verify: Whether to verify the broker. If False, any certificate is accepted, and anyone on the path can read and
            change everything.
        minimum_version: ``ssl.TLSVersion.TLSv1_2`` or ``ssl.TLSVersion.TLSv1_3``.
        context: A context made by the user, in place of every option above except `server_name` and `verify`. It must
            verify the certificate and the host name, unless ``verify=False`` is given as well.

    Raises:
        ConfigurationError: If an option is invalid or contradicts another one. The message names the field. Files are
            not read before `build_context`.
    """

    ca_file: FilePath | None = None
    ca_path: FilePath | None = None
    ca_data: str | bytes | None = field(default=None, repr=False)
    cert_file: FilePath | None = None
    key_file: FilePath | None = None
    key_password: str | bytes | Callable[[], str | bytes] | None = field(default=None, repr=False)
    server_name: str | None = None
    verify: bool = True
    minimum_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        check_flag("verify", self.verify)
        if self.minimum_version not in _MINIMUM_VERSIONS:
            raise ConfigurationError(f"minimum_version must be TLSv1_2 or TLSv1_3, not {self.minimum_version!r}")
        server_name: object = self.server_name
        if server_name is not None and not (isinstance(server_name, str) and is_host(server_name)):
            raise ConfigurationError(f"server_name must be a host name, not {self.server_name!r}")
        if self.cert_file is None:
            for name in ("key_file", "key_password"):
                if getattr(self, name) is not None:
                    raise ConfigurationError(f"{name} is given without cert_file: a key is of no use alone")
        if self.context is not None:
            self._check_context(self.context)
        elif not self.verify and not (self.ca_file is self.ca_path is self.ca_data is None):
            raise ConfigurationError("verify=False would ignore the authorities given by ca_file, ca_path or ca_data")

    @property
    def has_client_certificate(self) -> bool:
        """Whether a client certificate is given. A user's context counts as having one."""
        return self.cert_file is not None or self.context is not None

    def build_context(self) -> ssl.SSLContext:
        """Return the context for one connect.

        Reads the files, and logs a warning if verification is off.

        Raises:
            ConfigurationError: If a file cannot be read or used, or the user's context was changed so that it no longer
                verifies. The message names the field.
        """
        if not self.verify:
            logger.warning("TLS verification is off (TLSOptions(verify=False)): anyone on the path can be the broker")
        if self.context is not None:
            self._check_context(self.context)
            return self.context
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = self.minimum_version
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            self._load_authorities(context)
        if self.cert_file is not None:
            self._load_client_certificate(context, self.cert_file)
        return context

    def _check_context(self, context: ssl.SSLContext) -> None:
        if not isinstance(context, ssl.SSLContext):
            raise ConfigurationError(f"context must be an ssl.SSLContext, not {type(context).__name__}")
        for option in fields(self):
            if option.name not in _BESIDE_CONTEXT and getattr(self, option.name) != option.default:
                raise ConfigurationError(f"{option.name} is given beside context: set it on the context itself")
        if context.protocol == ssl.PROTOCOL_TLS_SERVER:
            raise ConfigurationError("context is a server's: make it with ssl.create_default_context()")
        verifies = context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname
        if self.verify and not verifies:
            raise ConfigurationError(
                "context does not verify the broker: set verify_mode = ssl.CERT_REQUIRED and check_hostname = True "
                "on it, or say TLSOptions(verify=False) as well"
            )
        if verifies and not self.verify:
            raise ConfigurationError("verify=False is given beside a context that verifies: leave one of them out")

    def _load_authorities(self, context: ssl.SSLContext) -> None:
        if self.ca_file is self.ca_path is self.ca_data is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if self.ca_file is not None:
            _require_file("ca_file", self.ca_file)
            try:
                context.load_verify_locations(cafile=self.ca_file)
            except ssl.SSLError as error:
                raise ConfigurationError(f"ca_file {_shown(self.ca_file)} holds no PEM certificate: {error}") from error
        if self.ca_path is not None:
            # OpenSSL silently accepts a missing directory and trusts no authority.
            if not Path(self.ca_path).is_dir():
                raise ConfigurationError(f"ca_path {_shown(self.ca_path)} is not a directory that can be read")
            context.load_verify_locations(capath=self.ca_path)
        if self.ca_data is not None:
            try:
                context.load_verify_locations(cadata=self.ca_data)
            except (ssl.SSLError, ValueError, TypeError) as error:
                raise ConfigurationError(f"ca_data is not a certificate in PEM or DER: {error}") from error

    def _load_client_certificate(self, context: ssl.SSLContext, cert_file: FilePath) -> None:
        _require_file("cert_file", cert_file)
        if self.key_file is not None:
            _require_file("key_file", self.key_file)
        try:
            context.load_cert_chain(cert_file, self.key_file, self._ask_key_password)
        except ssl.SSLError as error:
            raise self._client_certificate_error(cert_file, error) from error
        except ConfigurationError:
            raise
        except (TypeError, ValueError):  # without its cause, which may hold the password
            raise ConfigurationError("key_password must be text or bytes, up to 1024 bytes in UTF-8") from None

    def _ask_key_password(self) -> str | bytes:
        # Always passed to OpenSSL, which would otherwise ask for the password on the terminal and wait.
        if self.key_password is None:
            raise ConfigurationError("key_password is missing: the client's private key is encrypted")
        if not callable(self.key_password):
            return self.key_password
        try:
            return self.key_password()
        except Exception as error:
            raise ConfigurationError(
                f"key_password could not be had: its callable raised {type(error).__name__}"
            ) from error

    def _client_certificate_error(self, cert_file: FilePath, error: ssl.SSLError) -> ConfigurationError:
        key = "cert_file" if self.key_file is None else "key_file"
        key_shown = _shown(cert_file if self.key_file is None else self.key_file)
        if error.reason == "KEY_VALUES_MISMATCH":
            return ConfigurationError(f"{key} {key_shown} is not the key of the certificate in {_shown(cert_file)}")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=cert_file)
        except ssl.SSLError:
            return ConfigurationError(f"cert_file {_shown(cert_file)} holds no PEM certificate: {error}")
        wrong_password = " with this key_password" if self.key_password is not None else ""
        return ConfigurationError(
            f"{key} {key_shown} holds no PEM private key that can be read{wrong_password}: {error}"
        )


def server_hostname(options: TLSOptions, host: str) -> str:
    """Return the name to send (SNI) and to verify for a host of the URL.

    The zone of a link-local address names an interface of this machine, so no certificate contains it.
    """
    name = options.server_name or host.partition("%")[0]
    return name.removesuffix(".")  # of a fully qualified name


def _require_file(name: str, path: FilePath) -> None:
    # The FileNotFoundError of ``ssl`` does not name the file.
    try:
        with Path(path).open("rb"):
            pass
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"{name} {_shown(path)} cannot be read: {error}") from error


def _shown(path: FilePath) -> str:
    return repr(str(path))
