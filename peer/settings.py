"""Every setting of a peer can be given as a flag, a `VALENCE_…` variable or in a TOML file.

A flag overrides a variable, and a variable overrides the file. `VALENCE_X_FILE` names a file that
holds the value of X, for secrets. Without `--config`, the TOML file is `peer.toml` in the data
directory, if there is one.
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
    """A list, or a text with commas or spaces between its parts."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class SettingsError(ValueError):
    """A missing or wrong setting; the text names it and says what to do."""


_CGROUP = Path("/sys/fs/cgroup")
_CHOICES = {"sandbox": ("auto", "off", "bwrap"), "overlay": OVERLAYS, "preset": tuple(PRESETS)}


def _memory_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory of this machine, or of this container if that has less."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
        memory_bytes = min(memory_bytes, int((cgroup / "memory.max").read_text()))
    return memory_bytes


def _millicores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may use: its CPU affinity, and its container's quota."""
    millicores = 1000 * len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        millicores = min(millicores, 1000 * int(quota) // int(period))
    return max(100, millicores)


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    data: Path = Field(Path("valence-data"), description="directory for all state of this peer")
    host: str = Field("127.0.0.1", description="address to listen on for other peers")
    advertise: str = Field("", description="address at which other peers reach this peer")
    port: int = Field(0, ge=0, le=65535, description="UDP and TCP port; 0: a free one")
    http_host: str = Field("127.0.0.1", description="address to listen on for HTTP")
    http_port: int = Field(0, ge=0, le=65535, description="HTTP port; 0: a free one")
    http_advertise: str = Field("", description="URL at which others reach this peer's HTTP")
    join: Names = Field((), description="peers to join, as host:port; one that answers is enough")
    cluster_key: str = Field("", description="secret shared by all peers of a cluster", repr=False)
    token: str = Field("", description="admin token for HTTP clients", repr=False)
    revoked: Names = Field((), description="ids of tokens that are no longer accepted")
    sandbox: str = Field(
        "auto", description="sandbox for tasks: bwrap, off, or auto (bwrap where it works)"
    )
    local_urls: bool = Field(
        default=False,
        description="let workflows read from and deliver to this machine's own addresses",
    )
    root_tasks: bool = Field(
        default=False, description="let tasks run as root if no other user is available"
    )
    site: str = Field("default", max_length=100, description="name of the site this peer is at")
    queue: str = Field("", description="URL of the task queue that this peer's site pulls from")
    cpus: float = Field(default=0.0, ge=0, le=100_000, description="cores to offer; 0: all")
    memory: Size = Field(0, description="memory to offer; 0: 90 percent of this machine's")
    disk: Size = Field(10 * 2**30, description="disk quota for files")
    gpus: int = Field(0, ge=0, le=10_000, description="GPUs to offer")
    speed: float = Field(1.0, gt=0, le=1e6, description="speed, relative to a reference of 1")
    labels: Names = Field((), max_length=64, description="labels that tasks can ask for")
    software: Names = Field((), max_length=64, description="software that tasks can ask for")
    files: Names = Field(
        (), max_length=64, description="directories that workflows may use with file:///… URLs"
    )
    s3_endpoint: str = Field("", description="URL of the S3-compatible service for s3://… URLs")
    s3_region: str = Field("us-east-1", max_length=100, description="S3 region")
    s3_access_key: str = Field("", description="S3 access key", repr=False)
    s3_secret_key: str = Field("", description="S3 secret key", repr=False)
    preset: str = Field("lan", description="timing: " + " or ".join(PRESETS))
    overlay: str = Field("kademlia", description="overlay network: " + " or ".join(OVERLAYS))
    keepers: int = Field(3, ge=1, le=9, description="replicas of a workflow's journal; odd")
    majority_lost: Patience = Field(
        float("inf"),
        description="continue a workflow that lost most of its replicas after this time; "
        "default: never",
    )
    grace: Duration = Field(10.0, description="time that running tasks get to finish on SIGTERM")
    blob_max: Size = Field(64 * 2**30, description="size limit of a file")
    log_max: Size = Field(2**20, description="size limit of the log kept of a task")
    requests_max: int = Field(512, ge=1, le=100_000, description="limit of open HTTP requests")
    retention: Duration = Field(14 * 86400.0, description="how long to keep finished workflows")
    quiet: bool = Field(default=False, description="write only errors to standard error")

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
    """Merge the three sources; every problem names the setting and its source."""
    values, origin = _from_environment(environment)
    for name, value in flags.items():
        if value is not None and name in Settings.model_fields:
            values[name], origin[name] = value, "--" + name.replace("_", "-")
    for name, value in _from_file(_toml_path(flags, values)).items():
        if name not in values:
            values[name], origin[name] = value, f"{name} in the TOML file"
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join(_problems(error, origin))) from None
    _check(settings, origin)
    if need_secrets:
        _check_secrets(settings)
    return settings


def _from_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name in Settings.model_fields:
        variable = f"VALENCE_{name.upper()}"
        if environment.get(variable):
            values[name], origin[name] = environment[variable], variable
        elif environment.get(f"{variable}_FILE"):
            values[name] = _secret(environment[f"{variable}_FILE"], f"{variable}_FILE")
            origin[name] = f"{variable}_FILE"
    return values, origin


def _problems(error: ValidationError, origin: Mapping[str, str]) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        name = str(problem["loc"][0]) if problem["loc"] else "?"
        lines.append(f"{origin.get(name, name)}: {problem['msg'].removeprefix('Value error, ')}")
    return lines


def _check(settings: Settings, origin: Mapping[str, str]) -> None:
    for seed in settings.join:
        host, _, port = seed.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise SettingsError(f"{origin['join']}: expected host:port, not {seed!r}")
    if settings.keepers % 2 == 0:
        raise SettingsError(
            f"{origin['keepers']}: expected an odd number, not {settings.keepers}: an even number "
            "survives no more failures than one less"
        )
    for name, choices in _CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            listed = ", ".join(choices)
            raise SettingsError(f"{origin[name]}: expected one of {listed}, not {value!r}")


def _check_secrets(settings: Settings) -> None:
    for name, noun in (("cluster_key", "cluster key"), ("token", "token")):
        value = getattr(settings, name)
        if not value:
            variable = f"VALENCE_{name.upper()}"
            raise SettingsError(
                f"there is no {noun}: set {variable}, or {variable}_FILE to a file that holds it "
                f"(`valence key` makes one)"
            )
        if len(value) < 16:
            raise SettingsError(
                f"the {noun} is shorter than 16 characters (`valence key` makes a good one)"
            )


def _toml_path(flags: Mapping[str, Any], values: Mapping[str, Any]) -> Path | None:
    named = flags.get("config")
    if named:
        return Path(named)
    path = Path(values.get("data") or "valence-data") / "peer.toml"
    return path if path.exists() else None


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {_reason(error)}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name.endswith("_file") and name[:-5] in Settings.model_fields:
            values[name[:-5]] = _secret(str(value), str(path))
        elif name in Settings.model_fields:
            values[name] = tuple(value) if isinstance(value, list) else value
        else:
            raise SettingsError(f"{path}: unknown setting {key!r} (`--help` lists all)")
    return values


def _secret(path: str, origin: str) -> str:
    try:
        return Path(path).read_text().strip()
    except FileNotFoundError:
        raise SettingsError(f"{origin}: {path}: file not found (`valence key` makes one)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{origin}: {path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "file not found"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)


def from_arguments(argv: Sequence[str], prog: str) -> Settings:
    parser = argparse.ArgumentParser(prog=prog, description="Run one peer.", epilog=__doc__)
    add_flags(parser)
    return load(vars(parser.parse_args(argv)), os.environ)
