"""`valence up`: a cluster on this machine, forked from one warmed process.

The parent imports everything once and forks: a hundred peers start in seconds and share memory.
Each peer has a directory of its own with a `peer.toml`, so `valence peer --data DIR` starts a
single one again. The parent only watches; when it ends, however it ends, its peers leave.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import local
from .display import Display

PASSED_ON = (
    "VALENCE_S3_",
    "VALENCE_FILES",
    "VALENCE_QUEUE",
    "VALENCE_KEEPERS",
    "VALENCE_MAJORITY_LOST",
)
START_S_MAX = 60.0
STOP_S_MAX = 15.0
HTTP_PORT = 8470
PEERS_MAX = 1000
SEEDS = 3


@dataclass(frozen=True, slots=True)
class Options:
    peers: int
    cpus: float
    memory: int
    disk: str
    http_port: int
    grace: str
    sandbox: str
    overlay: str
    site: str
    fresh: bool
    detach: bool


def up(options: Options, display: Display) -> int:
    root = local.directory()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.chmod(0o700)
    lock = (root / "up.lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        display.error(
            f"a local cluster is running (pid {local.supervisor()}); `valence down` stops it"
        )
        return 1
    _write_pid(lock)
    running = [peer for peer in local.peers() if local.alive(peer)]
    if running:
        which = ", ".join(f"{Path(p['data']).name} (pid {p['pid']})" for p in running)
        display.error(f"running already: {which}; `valence down` stops them")
        return 1
    if options.fresh:
        from valence.peer.removal import remove_tree

        for path in root.glob("peer-*"):
            remove_tree(path)
    if os.geteuid() == 0:
        _warn_of_root(root, display)
    if options.detach:
        return _detach(options, display, lock)
    return _Supervisor(root, options, display, lock).run()


def _warn_of_root(root: Path, display: Display) -> None:
    """Tasks have users of their own where they can; where they can't, whoever starts it is told."""
    from valence.peer.users import NoUsers, Users

    root.chmod(0o711)  # what is in there is closed by itself
    try:
        Users.find(root)
    except NoUsers as error:
        root.chmod(0o700)
        display.warn(f"tasks run as root, as {error}; better start it as another user")
    finally:
        (root / "users.json").unlink(missing_ok=True)


def _write_pid(lock: Any) -> None:
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def _detach(options: Options, display: Display, lock: Any) -> int:
    """The supervisor goes to the background; this process waits until the peers are up."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            os.setsid()
            _write_pid(lock)
            root = local.directory()
            _redirect(root / "up.log")
            report = os.fdopen(write, "w")
            code = _Supervisor(root, options, Display(sys.stdout), lock, report).run()
        except BaseException as error:
            print(f"valence up: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(write)
    lock.close()
    with os.fdopen(read) as report:
        said = report.read()  # until the supervisor closes it: its children have done so at once
    if said.startswith("ok"):
        display.say(said[3:].rstrip())
        display.say("It runs in the background; `valence down` stops it.")
        return 0
    display.error(said.strip() or f"it did not start; {local.directory() / 'up.log'} says why")
    return 1


def _redirect(path: Path) -> None:
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.close(null)


class _Supervisor:
    def __init__(
        self, root: Path, options: Options, display: Display, lock: Any, report: Any = None
    ) -> None:
        self._root = root
        self._options = options
        self._display = display
        self._lock = lock
        self._report = report
        self._children: dict[int, Path] = {}
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        try:
            # everything a peer needs, once, before the forks
            from valence.peer import main as peer_main

            gc.collect()
            gc.freeze()
            with _one_at_a_time():  # a free port is free until another cluster takes it
                self._prepare()
                start = time.monotonic()
                for directory in self._directories():
                    if self._stopping:
                        break
                    self._fork(directory, peer_main)
                if not self._wait_until_up(start):
                    return self._end(1)
            self._watch()
            return self._end(0)
        except OSError as error:
            self._tell(f"valence up: {error}", failed=True)
            return self._end(1)

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True

    def _directories(self) -> list[Path]:
        return [self._root / f"peer-{i:03d}" for i in range(self._options.peers)]

    def _prepare(self) -> None:
        for name in ("key", "token"):
            path = self._root / name
            if not path.exists():
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(fd, "w") as file:
                    file.write(secrets.token_urlsafe(32) + "\n")
            path.chmod(0o600)
        directories = self._directories()
        for stale in self._root.glob("peer-*/peer.json"):
            if stale.parent not in directories:
                stale.unlink()  # a peer of a larger cluster of before
        seeds: list[str] = []
        for index, directory in enumerate(directories):
            directory.mkdir(mode=0o700, exist_ok=True)
            port = _free_port() if index < SEEDS else 0
            config = self._config(index, port, seeds)
            if port:
                seeds.append(f"127.0.0.1:{port}")
            path = directory / "peer.toml"
            path.write_text(config)
            path.chmod(0o600)

    def _config(self, index: int, port: int, seeds: list[str]) -> str:
        options = self._options
        rows: dict[str, Any] = {
            "cluster_key_file": str(self._root / "key"),
            "token_file": str(self._root / "token"),
            "join": seeds,
            "cpus": options.cpus,
            "memory": options.memory,
            "disk": options.disk,
            "grace": options.grace,
            "sandbox": options.sandbox,
            "local_urls": True,
            "root_tasks": True,  # one's own tasks, on one's own machine
            "overlay": options.overlay,
            "site": options.site,
            "port": port,
        }
        if index == 0:
            rows["http_port"] = options.http_port or _free_port(HTTP_PORT)
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items())

    def _fork(self, directory: Path, peer_main: Any) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children[pid] = directory
            return
        code = 1
        try:
            from valence.peer import nursery, settings

            # what is the supervisor's own: the lock says that *it* lives
            self._lock.close()
            if self._report is not None:
                self._report.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            nursery.die_with_parent()
            if os.getppid() != parent:
                os._exit(1)  # it was gone before it could be told apart
            _redirect(directory / "peer.log")
            # storage elements are the machine's; all else that is set is for other peers
            given = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
            plain = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
            os.environ.clear()
            os.environ.update(plain)
            code = peer_main.run(settings.load({"data": directory}, {**plain, **given}))
        except BaseException as error:
            print(f"valence up: {error!r}", file=sys.stderr)
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    def _wait_until_up(self, start: float) -> bool:
        wanted = dict(self._children)
        while wanted and not self._stopping:
            if time.monotonic() - start > START_S_MAX:
                self._tell(f"{len(wanted)} peers did not come up", failed=True)
                return False
            time.sleep(0.02)
            ended = self._reap()
            if ended:
                directory, how = ended[0]
                why = _last_line(directory / "peer.log")
                self._tell(f"{directory.name} {how} while starting: {why}", True)
                return False
            for pid, directory in list(wanted.items()):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    if json.loads((directory / "peer.json").read_text())["pid"] == pid:
                        del wanted[pid]
        if self._stopping:
            return True
        took = time.monotonic() - start
        first = json.loads((self._directories()[0] / "peer.json").read_text())
        count = len(self._children)
        self._tell(
            f"{count} peer{'s' * (count > 1)} up in {took:.1f} s; HTTP at {first['http']}\n"
            "Try: valence submit examples/word-count.yaml --watch"
        )
        return True

    def _tell(self, text: str, failed: bool = False) -> None:
        if self._report is not None:
            self._report.write(text if failed else f"ok {text}")
            self._report.close()
            self._report = None
        elif failed:
            self._display.error(text)
        else:
            self._display.say(text)
            self._display.say("Ctrl-C stops it.")

    def _reap(self) -> list[tuple[Path, str]]:
        found = []
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            directory = self._children.pop(pid, None)
            if directory is not None:
                found.append((directory, how))
        return found

    def _watch(self) -> None:
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while self._children and not self._stopping:
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)
            for directory, how in self._reap():
                if not self._stopping:
                    self._display.say(
                        f"{directory.name} {how}; start it again with: "
                        f"valence peer --data {directory}"
                    )

    def _end(self, code: int) -> int:
        """All at once: SIGINT means at once for tasks too. Never waits for ever."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        deadline = time.monotonic() + STOP_S_MAX
        while self._children and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.02)
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._children and self._reap():
            pass
        return code


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"see {path}"
    return f"see {path}"


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of this user's local clusters, one starts at a time. Whoever waits too long goes ahead."""
    path = Path(tempfile.gettempdir()) / f"valence-up-{os.getuid()}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            time.sleep(0.05)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # for the peers too, which have it by the fork
        os.close(fd)


def _free_port(wanted: int = 0) -> int:
    """A port free for both UDP and TCP; the wanted one if it is."""
    for candidate in (wanted, 0, 0, 0, 0) if wanted else (0,) * 5:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp,
        ):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                udp.bind(("127.0.0.1", candidate))
                port: int = udp.getsockname()[1]
                tcp.bind(("127.0.0.1", port))
                return port
    raise OSError("no free port was found")


def down(display: Display) -> int:
    pid = local.supervisor()
    singles = [int(peer["pid"]) for peer in local.peers() if local.alive(peer)]
    if pid is None and not singles:
        display.say("No local cluster is running.")
        return 0
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S_MAX + 5
    while pid is not None and local.supervisor() == pid:
        if time.monotonic() > deadline:
            display.error(f"the cluster (pid {pid}) is still stopping")
            return 1
        time.sleep(0.05)
    # peers that were started again by hand have no supervisor
    for peer in local.peers():
        if local.alive(peer):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(peer["pid"]), signal.SIGINT)
    while any(local.alive(peer) for peer in local.peers()):
        if time.monotonic() > deadline:
            display.error("some peers are still stopping")
            return 1
        time.sleep(0.05)
    display.say("The local cluster is down.")
    return 0
