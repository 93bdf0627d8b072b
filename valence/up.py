"""The commands `valence up` and `valence down`: a cluster on this machine, forked from one process.

The parent imports everything once and forks: a hundred peers start in seconds and share memory.
Each peer has a directory of its own with a `peer.toml`, so that `valence peer --data DIR` can
restart a single peer. After that the parent only watches. When it ends, for whatever reason, its
peers end too.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valence.workflow.shown import os_reason

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
PORTS, PORT_TRIES = (20_000, 32_000), 20
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
    json: bool


def up(options: Options, display: Display) -> int:
    root = local.directory()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.chmod(0o700)
    lock = (root / "up.lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        display.error(
            f"a local cluster is already running (pid {local.supervisor()}); "
            "stop it with `valence down`"
        )
        return 1
    _write_pid(lock)
    running = [peer for peer in local.peers() if local.alive(peer)]
    if running:
        which = ", ".join(f"{Path(p['data']).name} (pid {p['pid']})" for p in running)
        display.error(f"already running: {which}; stop them with `valence down`")
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
    """Warns if tasks would run as root because they can't have users of their own."""
    from valence.peer.users import NoUsers, Users

    root.chmod(0o711)  # everything inside has permissions of its own
    try:
        Users.find(root)
    except NoUsers as error:
        root.chmod(0o700)
        display.warn(f"tasks will run as root: {error}; start the cluster as another user")
    finally:
        (root / "users.json").unlink(missing_ok=True)


def _write_pid(lock: Any) -> None:
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def _detach(options: Options, display: Display, lock: Any) -> int:
    """Puts the supervisor into the background; this process waits until the peers are up."""
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
            print(f"valence up: {_shown(error)}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(write)
    lock.close()
    with os.fdopen(read) as report:
        text = report.read()  # until the supervisor closes it: its children have done so at once
    if text.startswith("ok"):
        display.say(text[3:].rstrip())
        if not options.json:
            display.say("It runs in the background; stop it with `valence down`.")
        return 0
    display.error(
        text.strip()
        or f"the cluster did not start; see {local.directory() / 'up.log'} for the reason"
    )
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
            # import everything that a peer needs once, before the forks
            from valence.peer import main as peer_main

            gc.collect()
            gc.freeze()
            with _one_at_a_time():  # another cluster that starts could take the free ports
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
            self._report_failure(f"the cluster did not start: {os_reason(error)}")
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
                stale.unlink()  # left by a larger cluster that ran before
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
            "root_tasks": True,  # the user's own tasks on the user's own machine
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

            # these are the supervisor's alone: the lock means that *it* is alive
            self._lock.close()
            if self._report is not None:
                self._report.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            nursery.die_with_parent()
            if os.getppid() != parent:
                os._exit(1)  # the supervisor died before `die_with_parent` was in force
            _redirect(directory / "peer.log")
            # storage elements belong to the machine; all other settings are for other peers
            passed_on = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
            plain = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
            os.environ.clear()
            os.environ.update(plain)
            code = peer_main.run(settings.load({"data": directory}, {**plain, **passed_on}))
        except BaseException as error:
            print(f"valence up: {_shown(error)}", file=sys.stderr)
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    def _wait_until_up(self, start: float) -> bool:
        wanted = dict(self._children)
        while wanted and not self._stopping:
            if time.monotonic() - start > START_S_MAX:
                self._report_failure(
                    f"{len(wanted)} of {self._options.peers} peers did not start within "
                    f"{START_S_MAX:g} s; see {next(iter(wanted.values())) / 'peer.log'}"
                )
                return False
            time.sleep(0.02)
            ended = self._reap()
            if ended:
                directory, how = ended[0]
                why = _last_line(directory / "peer.log")
                self._report_failure(f"{directory.name} {how} while starting: {why}")
                return False
            for pid, directory in list(wanted.items()):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    if json.loads((directory / "peer.json").read_text())["pid"] == pid:
                        del wanted[pid]
        if self._stopping:
            return True
        self._report_success(time.monotonic() - start)
        return True

    def _report_success(self, took_s: float) -> None:
        first = json.loads((self._directories()[0] / "peer.json").read_text())
        count = len(self._children)
        if self._options.json:
            text = json.dumps({"peers": count, "http": first["http"], "seconds": round(took_s, 3)})
        else:
            text = (
                f"{count} peer{'s' * (count > 1)} up in {took_s:.1f} s; HTTP at {first['http']}\n"
                "Try: valence submit examples/word-count.yaml --watch"
            )
        if self._report is not None:
            self._finish_report(f"ok {text}")
            return
        self._display.say(text)
        if not self._options.json:
            self._display.say("Stop it with Ctrl-C.")

    def _report_failure(self, text: str) -> None:
        if self._report is not None:
            self._finish_report(text)
        else:
            self._display.error(text)

    def _finish_report(self, text: str) -> None:
        """The process that waits for a detached supervisor reads this, and ends."""
        self._report.write(text)
        self._report.close()
        self._report = None

    def _reap(self) -> list[tuple[Path, str]]:
        """The peers that have ended, and how."""
        ended = []
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            how = _killed_by(-code) if code < 0 else f"ended with exit code {code}"
            directory = self._children.pop(pid, None)
            if directory is not None:
                ended.append((directory, how))
        return ended

    def _watch(self) -> None:
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while self._children and not self._stopping:
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)
            for directory, how in self._reap():
                if not self._stopping:
                    self._display.say(
                        f"{directory.name} {how}; restart it with: valence peer --data {directory}"
                    )

    def _end(self, code: int) -> int:
        """Ends all peers at once (SIGINT leaves tasks no grace), in bounded time."""
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


def _shown(error: BaseException) -> str:
    return os_reason(error) if isinstance(error, OSError) else repr(error)


def _killed_by(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name} (signal {number})"
    except ValueError:  # a signal without a name
        return f"was killed by signal {number}"


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"see {path}"
    return f"see {path}"


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Lets this user's local clusters start one at a time; one that has waited too long goes on."""
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
        fcntl.flock(fd, fcntl.LOCK_UN)  # for the peers too, which inherited it by the fork
        os.close(fd)


def _free_port(wanted: int = 0) -> int:
    """A port that is free for both UDP and TCP: the wanted one if it is. Others are drawn from
    below those that systems give to outgoing connections, which could take one before its peer."""
    drawn = [PORTS[0] + secrets.randbelow(PORTS[1] - PORTS[0]) for _ in range(PORT_TRIES)]
    for candidate in (*([wanted] if wanted else []), *drawn, 0):
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
    raise OSError("no free port found")


def down(display: Display, as_json: bool = False) -> int:
    pid = local.supervisor()
    running = pid is not None or any(local.alive(peer) for peer in local.peers())
    problem = _stop(pid) if running else ""
    if problem:
        display.error(problem)
        return 1
    if as_json:
        display.say(json.dumps({"stopped": running}))
    else:
        display.say("The local cluster is down." if running else "No local cluster is running.")
    return 0


def _stop(pid: int | None) -> str:
    """Stops the supervisor and all peers; says what is still running if that takes too long."""
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S_MAX + 5
    if not _wait(lambda: pid is None or local.supervisor() != pid, deadline):
        return f"the cluster (pid {pid}) is still stopping; try `valence down` again"
    # peers that were restarted by hand have no supervisor
    for peer in local.peers():
        if local.alive(peer):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(peer["pid"]), signal.SIGINT)
    if not _wait(lambda: not any(local.alive(peer) for peer in local.peers()), deadline):
        return "some peers are still stopping; try `valence down` again"
    return ""


def _wait(condition: Callable[[], bool], deadline: float) -> bool:
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
