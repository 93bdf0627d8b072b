"""The command line. Exit codes: 0 done, 1 the workflow or the cluster failed, 2 the command or the
document is wrong, 3 no peer answered, 130 interrupted."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from valence.protocols.config import OVERLAYS
from valence.workflow.problems import DocumentError
from valence.workflow.quantities import show_bytes, show_seconds
from valence.workflow.shown import plain
from valence.workflow.strategies import names

from . import local
from .client import Client, Problem, Unreachable, WorkflowHandle
from .display import Display, Progress

AWAY_S = 2.0

Command = Callable[[argparse.Namespace, Display], int]


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["peer"]:
        from valence.peer.main import main as peer_main

        return peer_main(arguments[1:], "valence peer")
    if arguments[:1] == ["queue"]:
        from valence.master.main import main as queue_main

        return queue_main(arguments[1:], "valence queue")
    options = _parser().parse_args(arguments)
    display = Display()
    try:
        command: Command = options.command
        return command(options, display)
    except DocumentError as error:
        for problem in error.problems:
            line = f":{problem.line}" if problem.line else ""
            where = problem.place or "the document"
            display.error(f"{getattr(options, 'file', '')}{line}: {where}: {problem.message}")
        return 2
    except Problem as problem:
        if problem.status == 401:
            expired = "expired" in problem.detail or "revoked" in problem.detail
            wrong = "the token is wrong: set VALENCE_TOKEN to the cluster's"
            display.error(problem.detail.partition(":")[0] if expired else wrong)
            return 1
        display.error(problem.detail)
        for found in problem.errors[1:]:
            display.error(f"{found['pointer']}: {found['message']}")
        return 2 if problem.status in (400, 415, 422) else 1
    except Unreachable as error:
        display.error(str(error))
        return 3
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        display.error(str(error))
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="valence", description="Scientific workflows on a pool of machines, with no head node."
    )
    parser.add_argument(
        "--version", action="version", version=f"valence {version('valence-workflows')}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    def listing(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = add(name, command, text)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    sub = add("up", _up, "Start a cluster on this machine.")
    sub.add_argument("--peers", type=_count, default=4, metavar="N", help="how many (4)")
    sub.add_argument("--cpus", type=float, default=0.0, help="cores each peer offers")
    sub.add_argument("--memory", default="0", help="memory each peer offers, such as 2GiB")
    sub.add_argument("--disk", default="10GiB", help="quota of each peer's files (10GiB)")
    port = "of the first peer (8470, or any if that is taken)"
    sub.add_argument("--http-port", type=_port, default=0, help=port)
    sub.add_argument("--sandbox", default="off", help="off, or bwrap: what tasks run in")
    found = "how peers find keys (kademlia)"
    sub.add_argument("--overlay", choices=OVERLAYS, default="kademlia", help=found)
    sub.add_argument("--site", default="default", help="where its peers are (default)")
    sub.add_argument(
        "--grace", default="10s", help="how long tasks may finish when one peer gets SIGTERM (10s)"
    )
    sub.add_argument("--fresh", action="store_true", help="forget what earlier clusters kept")
    sub.add_argument("--detach", action="store_true", help="run it in the background")
    add("down", _down, "Stop the local cluster.")
    commands.add_parser("peer", help="Run one peer; see `valence peer --help`.")
    commands.add_parser("queue", help="Run a task queue; see `valence queue --help`.")

    sub = listing("submit", _submit, "Submit a workflow document or a WfFormat instance.")
    sub.add_argument("file", help="YAML or JSON; - reads standard input")
    sub.add_argument(
        "--watch",
        action="store_true",
        help="follow it; 0 only if it succeeds (with --json: a line an event)",
    )
    sub.add_argument("--time-scale", type=float, help="of a WfFormat instance's run times")
    sub.add_argument("--size-scale", type=float, help="of a WfFormat instance's file sizes")
    text = "how its tasks find peers, instead of what it says itself"
    sub.add_argument("--strategy", choices=names(), help=text)
    sub.add_argument("--key", help="an idempotency key: repeats submit once")

    sub = listing("ls", _ls, "List workflows, newest first.")
    states = ("running", "succeeded", "failed", "cancelled")
    sub.add_argument("--state", default="", choices=states, help="only those in this state")
    sub.add_argument("--limit", type=_count, default=50, help="how many at most (50)")
    for name, command, text in (
        ("status", _status, "Show one workflow."),
        ("tasks", _tasks, "List a workflow's tasks."),
        ("files", _files, "List a workflow's files."),
        ("cancel", _cancel, "End a workflow: running tasks are killed."),
        ("watch", _watch, "Follow a workflow until it has ended; 0 only if it succeeds."),
    ):
        sub = listing(name, command, text)
        sub.add_argument("id", help="the workflow's id, or the beginning of it")
    sub = add("logs", _logs, "Print what a task wrote to its standard output and error.")
    sub.add_argument("id")
    sub.add_argument("task")
    sub.add_argument("--attempt", type=_count, help="its number; the latest if left out")
    sub = listing("why", _why, "Say what a task waits for, and why it ran where it ran.")
    sub.add_argument("id")
    sub.add_argument("task")
    sub = listing("get", _get, "Fetch a workflow's results.")
    sub.add_argument("id")
    sub.add_argument("dir", nargs="?", default=".", help="where to put them (here)")
    sub.add_argument("--all", action="store_true", help="intermediate files too")
    listing("peers", _peers, "List the peers of the cluster.")
    sub = add("token", _token, "Print the cluster's token, or make one for somebody.")
    sub.add_argument("--owner", help="make a token for this person or program")
    sub.add_argument("--scope", help="of that token: read, submit (default) or admin")
    sub.add_argument("--lasting", metavar="TIME", help="of that token; default: 90d")
    sub.add_argument("--json", action="store_true")
    add("key", _key, "Make a new random key, for a cluster or as a token.")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError("a port from 1 to 65535 is expected")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError("a number from 1 on is expected")
    return int(text)


# --------------------------------------------------------------------------- the cluster


def _up(options: argparse.Namespace, display: Display) -> int:
    from valence.workflow.quantities import seconds, size_bytes

    from . import up

    if options.peers > up.PEERS_MAX:
        raise ValueError(f"--peers: at most {up.PEERS_MAX}")
    seconds(options.grace)
    size_bytes(options.disk)
    cores = os.cpu_count() or 1
    memory = size_bytes(options.memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return up.up(
        up.Options(
            peers=options.peers,
            cpus=options.cpus or max(1, cores // options.peers),
            memory=memory or total * 9 // 10 // options.peers,
            disk=options.disk,
            http_port=options.http_port,
            grace=options.grace,
            sandbox=options.sandbox,
            overlay=options.overlay,
            site=options.site,
            fresh=options.fresh,
            detach=options.detach,
        ),
        display,
    )


def _down(options: argparse.Namespace, display: Display) -> int:
    from . import up

    return up.down(display)


def _peers(options: argparse.Namespace, display: Display) -> int:
    found = Client().peers()
    pids = {p["id"]: p["pid"] for p in local.peers() if local.alive(p)}
    for peer in found:
        peer["pid"] = pids.get(peer["id"], peer.get("pid"))
    if options.json:
        return _json(display, found)
    rows = []
    for p in found:
        free, capacity = p["free"], p["capacity"]
        rows.append(
            (
                p["id"][:8],
                p["state"],
                p["address"],
                p["http"],
                p["site"],
                f"{free['cpus']:g}/{capacity['cpus']:g}" if free else f"?/{capacity['cpus']:g}",
                show_bytes(capacity["memory"]),
                p["running"],
                p["pid"],
            )
        )
    heads = ("ID", "STATE", "ADDRESS", "HTTP", "SITE", "CPUS FREE", "MEMORY", "RUNNING", "PID")
    display.table(heads, rows)
    return 0


def _token(options: argparse.Namespace, display: Display) -> int:
    from .client import token_from_file

    found = os.environ.get("VALENCE_TOKEN") or token_from_file() or local.token()
    if not found:
        raise Unreachable("there is no token: start a cluster with `valence up`")
    if options.owner is None:
        if options.scope is not None or options.lasting is not None:
            raise ValueError(
                "--scope and --lasting are of a token for somebody: say for whom with --owner; "
                "without all three the cluster's own token is printed, which may do everything"
            )
        display.say(found)
        return 0
    from valence.peer import tokens
    from valence.workflow.quantities import seconds

    if found.startswith("v1."):
        raise ValueError("only the cluster's own token can make others")
    scope = options.scope or "submit"
    ends_at = time.time() + seconds(options.lasting or "90d")
    made, id = tokens.make(found, options.owner, scope, ends_at)
    if options.json:
        row = {"token": made, "id": id, "owner": options.owner, "scope": scope}
        return _json(display, {**row, "ends_at": int(ends_at)})
    display.say(made)
    return 0


def _key(options: argparse.Namespace, display: Display) -> int:
    display.say(secrets.token_urlsafe(32))
    return 0


# --------------------------------------------------------------------------- workflows


def _submit(options: argparse.Namespace, display: Display) -> int:
    from . import submission

    if options.file == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed")
        text, base = sys.stdin.buffer.read(), Path()
    else:
        path = Path(options.file)
        text, base = path.read_bytes(), path.parent
    # a mistake in the document is told before anybody is asked
    body, kind, uploads = submission.prepare_text(text, base)
    client = Client()
    asked = {
        "time_scale": options.time_scale,
        "size_scale": options.size_scale,
        "strategy": options.strategy,
    }
    workflow = client.send(body, kind, uploads, asked, options.key)
    if not options.watch:
        if options.json:
            return _json(display, workflow.view())
        display.say(workflow.id)
        hint = f"follow it with: valence watch {workflow.id}"
        if display.terminal:
            display.say(display.colour(hint, "dim"))
        return 0
    return _follow(workflow, options, display)


def _ls(options: argparse.Namespace, display: Display) -> int:
    client = Client()
    found = client.workflows(min(1000, options.limit), options.state)
    if client.unanswered:
        down = ", ".join(peer[:8] for peer in client.unanswered)
        print(f"not listed are the workflows of peers that are down: {down}", file=sys.stderr)
    if options.json:
        return _json(display, found)
    if not found:
        which = f" {options.state}" if options.state else ""
        display.say(f"There are no{which} workflows. Submit one: valence submit FILE")
        return 0
    now = time.time()
    rows = [
        (
            w["id"],
            w["state"],
            w["name"],
            w["tasks"],
            f"{show_seconds(max(0, now - w['submitted_at']))} ago",
            show_seconds((w["ended_at"] or now) - w["submitted_at"]),
        )
        for w in found
    ]
    display.table(("ID", "STATE", "NAME", "TASKS", "SUBMITTED", "TOOK"), rows)
    return 0


def _status(options: argparse.Namespace, display: Display) -> int:
    view = Client().workflow(options.id).view()
    if options.json:
        return _json(display, view)
    return _show(view, display)


def _show(view: dict[str, Any], display: Display) -> int:
    end = view["ended_at"] or time.time()
    took = show_seconds(max(0.0, end - view["submitted_at"]))
    state = display.colour(view["state"], view["state"])
    ran = f", on {_many(view['peers'], 'peer')}" if view["peers"] else ""
    display.say(f"{view['name']} ({view['id']}): {state}, {took}{ran}")
    counts = ", ".join(f"{n} {state}" for state, n in view["counts"].items())
    display.say(f"tasks: {counts}")
    others = [keeper[:8] for keeper in view["keepers"] if keeper != view["home"]]
    also = f", also kept by {' and '.join(others)}" if others else ""
    display.say(f"home: peer {view['home'][:8]}{also}")
    if view.get("blocked"):
        display.say(display.colour(f"it stands still: {view['blocked']}", "waiting"))
    elif view.get("risk"):
        display.say(display.colour(view["risk"], "dim"))
    read = _bytes_read(view)
    if read:
        display.say(f"inputs read: {read}")
    if view["late"]:
        display.say(display.colour("its deadline has passed", "failed"))
    for name, reason in view["waiting_inputs"].items():
        display.say(f"input {name}: {reason}")
    for name, reason in view["delivering"].items():
        display.say(f"result {name}: {reason}")
    for waiting in view["waiting"]:
        display.say(f"{waiting['task']} waits: {waiting['reason']}")
    for failure in view["failures"]:
        display.say(display.colour(f"{failure['task']}: {failure['reason']}", "failed"))
        display.say(f"  its output: valence logs {view['id']} '{failure['task']}'")
    if view["reason"] and not view["failures"]:
        display.say(view["reason"])
    return 0


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _short(peer: str) -> str:
    """A peer's id; or what else a task was given to, as it is."""
    return peer if " " in peer else peer[:8]


def _tasks(options: argparse.Namespace, display: Display) -> int:
    found = list(Client().workflow(options.id).tasks())
    if options.json:
        return _json(display, found)
    rows = [
        (
            t["id"],
            t["state"],
            t["attempts"],
            _short(t["peer"] or ""),
            "" if t["seconds"] is None else show_seconds(t["seconds"]),
            t["reason"] if len(t["reason"]) <= 60 else t["reason"][:59] + "…",
        )
        for t in found
    ]
    display.table(("TASK", "STATE", "ATTEMPTS", "PEER", "TOOK", "REASON"), rows)
    return 0


def _files(options: argparse.Namespace, display: Display) -> int:
    found = Client().workflow(options.id).files()
    if options.json:
        return _json(display, found)
    rows = [
        (
            f["name"],
            "" if f["size"] is None else show_bytes(f["size"]),
            f["made_by"] or "input",
            "ready" if f["ready"] else "not yet",
            "result" if f["final"] else "",
        )
        for f in found
    ]
    display.table(("FILE", "SIZE", "MADE BY", "STATE", "KIND"), rows)
    return 0


def _cancel(options: argparse.Namespace, display: Display) -> int:
    view = Client().workflow(options.id).cancel()
    if options.json:
        return _json(display, view)
    display.say(f"{view['id']} is {view['state']}")
    return 0


def _watch(options: argparse.Namespace, display: Display) -> int:
    return _follow(Client().workflow(options.id), options, display)


def _view_when_there(workflow: WorkflowHandle, display: Display) -> dict[str, Any]:
    """Who follows a workflow waits, also while too many of its keepers are away."""
    said = ""
    while True:
        try:
            return workflow.view()
        except Problem as problem:
            if problem.status != 503:
                raise
            if problem.detail != said:
                said = problem.detail
                print(f"{said}; waiting", file=sys.stderr, flush=True)
        time.sleep(AWAY_S)


def _follow(workflow: WorkflowHandle, options: argparse.Namespace, display: Display) -> int:
    view = _view_when_there(workflow, display)
    progress = None if options.json else Progress(display, view)
    if progress is not None:
        display.say(f"{view['name']} ({workflow.id}): {_many(view['tasks'], 'task')}")
    else:
        display.say(
            json.dumps({"type": "submitted", "workflow": workflow.id, "name": view["name"]})
        )
    try:
        for event in workflow.events():
            if progress is None:
                display.say(json.dumps(event))
            else:
                progress.event(event)
    except KeyboardInterrupt:
        if progress is not None:
            progress.close()
        print(f"{workflow.id} goes on; watch it with: valence watch {workflow.id}", file=sys.stderr)
        return 130
    view = workflow.view()
    if progress is not None:
        progress.close()
        _show(view, display)
        if view["state"] == "succeeded" and display.terminal:
            display.say(display.colour(f"fetch its results: valence get {workflow.id}", "dim"))
    return 0 if view["state"] == "succeeded" else 1


def _logs(options: argparse.Namespace, display: Display) -> int:
    text = Client().workflow(options.id).log(options.task, options.attempt)
    if display.terminal:
        display.out.write(plain(text.decode("utf-8", "replace").replace("\r\n", "\n")))
        display.out.flush()
    else:  # as it was, for a file or a pipe
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    return 0


def _bytes_read(view: dict[str, Any]) -> str:
    """Where its inputs were, in words; empty if it read none."""
    places = {
        "local": "on the peer's own disk",
        "peer": "from other peers",
        "origin": "from outside",
    }
    found = view.get("bytes") or {}
    return ", ".join(
        f"{show_bytes(found[key])} {words}" for key, words in places.items() if found.get(key)
    )


def _why(options: argparse.Namespace, display: Display) -> int:
    task = Client().workflow(options.id).task(options.task)
    if options.json:
        keys = ("id", "state", "reason", "waiting_for", "history")
        return _json(display, {k: task[k] for k in keys})
    display.say(f"{task['id']}: {display.colour(task['state'], task['state'])}")
    if task["waiting_for"]:
        display.say(f"waits for: {task['waiting_for']}")
    elif task["reason"]:
        display.say(task["reason"])
    for attempt in task["history"]:
        placement = attempt["placement"]
        ended = f": {attempt['reason']}" if attempt["reason"] else ""
        display.say(
            f"attempt {attempt['number']} on {_short(attempt['peer'])}: {attempt['state']}{ended}"
        )
        read = _bytes_read(attempt)
        if read:
            display.say(f"  inputs: {read}")
        looked = f"{placement['matching']} of {placement['known']} peers match; "
        found = "" if placement["matching"] is None else looked
        took_s = placement.get("sought_s")
        took = "" if took_s is None else f"; found within {1000 * took_s:.3g} ms"
        display.say(f"  {placement['strategy']}: {found}{placement['why']}{took}")
        for asked in placement["asked"]:
            answer = f"offered {asked['offered']}"
            if asked["refusal"]:
                answer += f" ({asked['refusal']})"
            mark = "→" if asked["peer"] == attempt["peer"] else " "
            display.say(f"  {mark} {asked['peer'][:8]} {answer}")
    return 0


def _get(options: argparse.Namespace, display: Display) -> int:
    workflow = Client().workflow(options.id)
    target = Path(options.dir)
    fetched = []
    missing = 0
    names = set()
    for file in workflow.files():
        names.add(file["name"])
        wanted = file["final"] or (options.all and file["made_by"])
        if not wanted:
            continue
        if not file["ready"]:
            display.error(f"{file['name']} is not there: {file['made_by']} has not succeeded")
            missing += 1
            continue
        path = target / file["name"]
        if not path.resolve().is_relative_to(target.resolve()):
            raise ValueError(f"{file['name']} would leave {target}")
        path.parent.mkdir(parents=True, exist_ok=True)
        size = workflow.download(file["name"], path)
        fetched.append({"name": file["name"], "path": str(path), "size": size})
        if not options.json:
            display.say(f"{path} ({show_bytes(size)})")
    values, others = workflow.json_values()
    if values or others:
        target.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(others):
            kind, data = workflow.raw_value(name)
            if kind == "json":
                values[name] = json.loads(data)
            else:  # kept as it is: to look into it is to run what its owner chose
                other = target / _unused(names, f"value-{number}.pickle")
                other.write_bytes(data)
                values[name] = {"pickle": other.name}
        path = target / _unused(names, "values.json")
        path.write_text(json.dumps(values, indent=2) + "\n")
        fetched.append({"name": path.name, "path": str(path), "size": path.stat().st_size})
        if not options.json:
            listed = ", ".join(list(values)[:5]) + ", …" * (len(values) > 5)
            display.say(f"{path} (the values of {listed})")
    if options.json:
        _json(display, fetched)
    elif not fetched and not missing:
        display.error("there is nothing to fetch")
    return 1 if missing or not fetched else 0


def _unused(names: set[str], name: str) -> str:
    """Never over a file of the workflow's own."""
    while name in names:
        name = f"valence-{name}"
    return name


def _json(display: Display, value: Any) -> int:
    display.say(json.dumps(value, indent=2))
    return 0
