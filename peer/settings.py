"""Every setting of a daemon, from flags, `VALENCE_…` variables or a TOML file, in that order.

`VALENCE_X_FILE` names a file that holds the value, for secrets. A peer's data directory may have a
`peer.toml` of its own, which is read when no other file is named.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from valence.protocols.config import OVERLAYS, PRESETS
from valence.workflow import quantities

Size = Annotated[int, BeforeValidator(quantities.size_bytes)]
Duration = Annotated[float, BeforeValidator(quantities.seconds)]


def _patience(value: object) -> object:
    return math.inf if value == "never" else quantities.seconds(value)


Patience = Annotated[float, BeforeValidator(_patience)]


def _listed(value: object) -> object:
    """A list, or a text with commas or blanks between."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class SettingsError(ValueError):
    """A setting is missing or wrong; the text names it and says what to do."""


_CGROUP = Path("/sys/fs/cgroup")


def _memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Of this machine, or of this container if that has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        found = min(found, int((cgroup / "memory.max").read_text()))
    return found


def _millicores(cgroup: Path = _CGROUP) -> int:
    """That this process may use: its affinity, and its container's quota."""
    found = 1000 * len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        found = min(found, 1000 * int(quota) // int(period))
    return max(100, found)


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    data: Path = Field(Path("valence-data"), description="directory for all state of this peer")
    host: str = Field("127.0.0.1", description="address to listen on for other peers")
    advertise: str = Field("", description="address that others reach this peer at")
    port: int = Field(0, ge=0, le=65535, description="UDP and TCP port; 0 takes a free one")
    http_host: str = Field("127.0.0.1", description="address to listen on for HTTP")
    http_port: int = Field(0, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    http_advertise: str = Field("", description="URL that others reach this peer's HTTP at")
    join: Names = Field((), description="host:port of peers to join, any of them will do")
    cluster_key: str = Field("", description="what peers of one cluster share", repr=False)
    token: str = Field("", description="what HTTP clients show, an admin's", repr=False)
    revoked: Names = Field((), description="ids of tokens that are not taken any more")
    sandbox: str = Field(
        "auto", description="what tasks run in: bwrap, off, or auto: bwrap where it works"
    )
    local_urls: bool = Field(
        default=False,
        description="let workflows read from and deliver to this machine's own addresses",
    )
    root_tasks: bool = Field(
        default=False, description="let tasks run as root where they can have no other user"
    )
    site: str = Field("default", max_length=100, description="where this peer stands")
    queue: str = Field("", description="URL of a task queue that this peer's site pulls from")
    cpus: float = Field(default=0.0, ge=0, le=100_000, description="cores to offer; 0: all")
    memory: Size = Field(0, description="memory to offer; 0: nine tenths of all")
    disk: Size = Field(10 * 2**30, description="quota for files")
    gpus: int = Field(0, ge=0, le=10_000)
    speed: float = Field(1.0, gt=0, le=1e6, description="speed against a reference of 1")
    labels: Names = Field((), max_length=64)
    software: Names = Field((), max_length=64)
    files: Names = Field(
        (), max_length=64, description="directories that workflows may read and write by file:///…"
    )
    s3_endpoint: str = Field("", description="URL of the S3-compatible service behind s3://…")
    s3_region: str = Field("us-east-1", max_length=100)
    s3_access_key: str = Field("", description="its access key", repr=False)
    s3_secret_key: str = Field("", description="its secret key", repr=False)
    preset: str = Field("lan", description="timing: " + " or ".join(PRESETS))
    overlay: str = Field("kademlia", description="how peers find keys: " + " or ".join(OVERLAYS))
    keepers: int = Field(3, ge=1, le=9, description="peers that keep a workflow's journal; odd")
    majority_lost: Patience = Field(
        float("inf"),
        description="go on without a lost majority of keepers after this long; default: never",
    )
    grace: Duration = Field(10.0, description="how long running tasks may finish on SIGTERM")
    blob_max: Size = Field(64 * 2**30, description="largest file")
    log_max: Size = Field(2**20, description="how much of a task's output is kept")
    requests_max: int = Field(512, ge=1, le=100_000, description="open HTTP requests")
    retention: Duration = Field(14 * 86400.0, description="finished workflows are kept so long")
    quiet: bool = Field(default=False, description="say nothing on standard error but errors")

    def capacity_millicores(self) -> int:
        return int(self.cpus * 1000) if self.cpus else _millicores()

    def capacity_memory_bytes(self) -> int:
        return self.memory or _memory_bytes() * 9 // 10

    @staticmethod
    def arch() -> str:
        return platform.machine() or "unknown"

    @staticmethod
    def os_name() -> str:
        return platform.system().lower() or "unknown"


def add_flags(parser: argparse.ArgumentParser, among: Collection[str] = ()) -> None:
    parser.add_argument("--config", metavar="FILE", help="a TOML file with settings")
    for name, field in Settings.model_fields.items():
        if among and name not in among:
            continue
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", default=None, help=field.description)
        else:
            parser.add_argument(flag, metavar=name.upper(), help=field.description)


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str], need_secrets: bool = True
) -> Settings:
    """Merge the three sources; every problem names the setting and where it was given."""
    given: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name in Settings.model_fields:
        variable = f"VALENCE_{name.upper()}"
        if environment.get(variable):
            given[name], origin[name] = environment[variable], variable
        elif environment.get(f"{variable}_FILE"):
            given[name] = _secret(environment[f"{variable}_FILE"], f"{variable}_FILE")
            origin[name] = f"{variable}_FILE"
    for name, value in flags.items():
        if value is not None and name in Settings.model_fields:
            given[name], origin[name] = value, "--" + name.replace("_", "-")
    for name, value in _file(flags, given).items():
        if name not in given:
            given[name], origin[name] = value, "the TOML file"
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        lines = []
        for found in error.errors(include_url=False, include_input=False):
            name = str(found["loc"][0]) if found["loc"] else "?"
            lines.append(f"{origin.get(name, name)}: {found['msg']}")
        raise SettingsError("\n".join(lines)) from None
    for seed in settings.join:
        host, _, port = seed.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise SettingsError(f"{origin['join']}: {seed!r}: write host:port")
    if settings.sandbox not in ("auto", "off", "bwrap"):
        raise SettingsError(f"{origin['sandbox']}: auto, off or bwrap")
    if settings.keepers % 2 == 0:
        raise SettingsError(f"{origin['keepers']}: an odd number: one more outlives no more deaths")
    if settings.overlay not in OVERLAYS:
        raise SettingsError(f"{origin['overlay']}: there are {', '.join(OVERLAYS)}")
    if settings.preset not in PRESETS:
        raise SettingsError(f"{origin['preset']}: there are {', '.join(PRESETS)}")
    if need_secrets:
        _check_secrets(settings)
    return settings


def _check_secrets(settings: Settings) -> None:
    for name, what in (("cluster_key", "cluster key"), ("token", "token")):
        value = getattr(settings, name)
        if not value:
            variable = f"VALENCE_{name.upper()}"
            raise SettingsError(
                f"there is no {what}: set {variable}, or {variable}_FILE to a file that holds it; "
                f"`valence key` makes one"
            )
        if len(value) < 16:
            raise SettingsError(
                f"the {what} is shorter than 16 characters; `valence key` makes one"
            )


def _file(flags: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    named = flags.get("config")
    path = Path(named) if named else Path(given.get("data") or "valence-data") / "peer.toml"
    if not named and not path.exists():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name.endswith("_file") and name[:-5] in Settings.model_fields:
            found[name[:-5]] = _secret(str(value), str(path))
        elif name in Settings.model_fields:
            found[name] = tuple(value) if isinstance(value, list) else value
        else:
            raise SettingsError(f"{path}: there is no setting {key!r}")
    return found


def _secret(path: str, origin: str) -> str:
    try:
        return Path(path).read_text().strip()
    except FileNotFoundError:
        raise SettingsError(f"{origin}: there is no file {path}; `valence key` makes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{origin}: {error}") from None


def from_arguments(argv: Sequence[str], prog: str) -> Settings:
    parser = argparse.ArgumentParser(prog=prog, description="Run one peer.", epilog=__doc__)
    add_flags(parser)
    return load(vars(parser.parse_args(argv)), os.environ)
