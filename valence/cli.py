"""The command line: each command with its options and what it prints.

Exit codes: 0 success; 1 the workflow or the cluster failed; 2 the command or the document is wrong;
3 no peer answered; 4 a deadline was not met, or can't be; 130 interrupted. What is internal to
Valence is printed with `--verbose` only, and always with `--json`.
"""

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
from valence.workflow.shown import os_reason, plain
from valence.workflow.strategies import names

from . import local
from .client import Client, Problem, Unreachable, WorkflowHandle
from .display import Display, Progress

AWAY_S = 2.0
#: the exit code if a deadline was not met, or can't be
TOO_LATE = 4
#: a deadline this far away stands for none
FAR_S = 300 * 86400.0
LISTED_MAX = 1000
#: strategies that explain a placement in the words of their papers
PAPERS = ("tickets", "chemical", "pilots")
#: states that are easily confused, with what they mean
_STATES = {
    "pending": "pending (ready to run, no peer yet)",
    "waiting": "waiting (for inputs or other tasks)",
}

Command = Callable[[argparse.Namespace, Display], int]


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["peer"], ["queue"]):
        return _run_daemon(arguments[0], arguments[1:])
    options = _parser().parse_args(arguments)
    display = Display()
    try:
        command: Command = options.command
        return command(options, display)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except DocumentError as error:
        return _document_failed(error, getattr(options, "file", "-"), display)
    except Problem as problem:
        return _request_failed(problem, display)
    except Unreachable as error:
        display.error(str(error))
        return 3
    except (OSError, ValueError) as error:
        display.error(os_reason(error) if isinstance(error, OSError) else str(error))
        return 2


def _run_daemon(name: str, arguments: list[str]) -> int:
    if name == "peer":
        from valence.peer.main import main as run
    else:
        from valence.master.main import main as run
    return run(arguments, f"valence {name}")


def _document_failed(error: DocumentError, file: str, display: Display) -> int:
    file = "standard input" if file == "-" else file
    for problem in error.problems:
        line = f":{problem.line}" if problem.line else ""
        display.error(f"{file}{line}: {problem.place or 'the document'}: {problem.message}")
    return 2


def _request_failed(problem: Problem, display: Display) -> int:
    if problem.status == 401:
        ended = "expired" in problem.detail or "revoked" in problem.detail
        wrong = "the token was refused: set VALENCE_TOKEN to a token of this cluster"
        display.error(problem.detail.partition(":")[0] if ended else wrong)
        return 1
    display.error(problem.detail)
    for row in problem.errors[1:]:
        display.error(f"{row['pointer']}: {row['message']}")
    if problem.infeasible:
        if problem.offer:
            accept = f"add --accept {problem.offer} within ten seconds"
            print(f"to have it done by then: {accept}, or choose a later deadline", file=sys.stderr)
        return TOO_LATE
    return 2 if problem.status in (400, 415, 422) else 1


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
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    sub = add("up", _up, "Start a cluster on this machine.")
    sub.add_argument("--peers", type=_count, default=4, metavar="N", help="number of peers (4)")
    sub.add_argument("--cpus", type=float, default=0.0, help="cores that each peer offers")
    sub.add_argument("--memory", default="0", help="memory that each peer offers, such as 2GiB")
    sub.add_argument("--disk", default="10GiB", help="disk quota for each peer's files (10GiB)")
    text = "HTTP port of the first peer (8470, or any free port if that is taken)"
    sub.add_argument("--http-port", type=_port, default=0, metavar="PORT", help=text)
    sub.add_argument("--sandbox", default="off", help="run tasks inside: off or bwrap (off)")
    text = "overlay network for lookups (kademlia)"
    sub.add_argument("--overlay", choices=OVERLAYS, default="kademlia", help=text)
    sub.add_argument("--site", default="default", help="site name of all its peers (default)")
    text = "time that running tasks get to finish after a peer receives SIGTERM (10s)"
    sub.add_argument("--grace", default="10s", metavar="TIME", help=text)
    sub.add_argument("--fresh", action="store_true", help="delete the data of earlier clusters")
    sub.add_argument("--detach", action="store_true", help="run in the background")
    add("down", _down, "Stop the local cluster.")
    commands.add_parser("peer", help="Run one peer; see `valence peer --help`.")
    commands.add_parser("queue", help="Run a task queue; see `valence queue --help`.")
    _add_workflow_commands(add)
    add("peers", _peers, "List the peers of the cluster.")
    sub = add("token", _token, "Print the cluster's token, or make one for another user.")
    sub.add_argument("--owner", help="make a token for this person or program")
    sub.add_argument("--scope", help="scope of the new token: read, submit (default) or admin")
    sub.add_argument("--lasting", metavar="TIME", help="lifetime of the new token (90d)")
    add("key", _key, "Make a new random key, to use as a cluster key or as a token.")
    return parser


def _add_workflow_commands(add: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    def of_workflow(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = add(name, command, text)
        sub.add_argument("id", metavar="ID", help="the workflow's id, or its first characters")
        return sub

    def of_task(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = of_workflow(name, command, text)
        sub.add_argument("task", metavar="TASK", help="the task's id, such as 'count[aa]' (quoted)")
        return sub

    sub = add("submit", _submit, "Submit a workflow document or a WfFormat instance.")
    sub.add_argument("file", metavar="FILE", help="YAML or JSON; - reads standard input")
    text = "follow it to its end; exit code 0 only if it succeeds (with --json: one event per line)"
    sub.add_argument("--watch", action="store_true", help=text)
    text = "multiply the run times of a WfFormat instance by this"
    sub.add_argument("--time-scale", type=float, metavar="FACTOR", help=text)
    text = "multiply the file sizes of a WfFormat instance by this"
    sub.add_argument("--size-scale", type=float, metavar="FACTOR", help=text)
    text = "strategy by which tasks find peers, overriding the document's"
    sub.add_argument("--strategy", choices=names(), help=text)
    text = "accept an offer: the later end that was offered when the deadline could not be met"
    sub.add_argument("--accept", metavar="OFFER", help=text)
    text = "idempotency key: submitting again with the same key starts nothing new"
    sub.add_argument("--key", help=text)
    _add_verbose(sub)

    text = "Show where and when each task would run, and when all is done. Nothing is submitted."
    sub = add("plan", _plan, text)
    sub.add_argument("file", metavar="FILE", help="YAML or JSON; - reads standard input")

    sub = add("ls", _ls, "List workflows, newest first.")
    states = ("running", "succeeded", "failed", "cancelled")
    sub.add_argument("--state", default="", choices=states, help="only workflows in this state")
    text = f"list at most N workflows, up to {LISTED_MAX:,} (50)"
    sub.add_argument("--limit", type=_listed, default=50, metavar="N", help=text)
    _add_verbose(of_workflow("status", _status, "Show one workflow."))
    of_workflow("tasks", _tasks, "List the tasks of a workflow.")
    of_workflow("files", _files, "List the files of a workflow.")
    of_workflow("cancel", _cancel, "Cancel a workflow and kill its running tasks.")
    text = "Follow a workflow until it ends; exit code 0 only if it succeeds."
    _add_verbose(of_workflow("watch", _watch, text))
    sub = of_task("logs", _logs, "Print a task's standard output and standard error.")
    sub.add_argument("--attempt", type=_count, metavar="N", help="attempt number (the latest)")
    _add_verbose(of_task("why", _why, "Show why a task is waiting, or why it ran on its peer."))
    sub = of_workflow("get", _get, "Download the results of a workflow.")
    text = "directory to download into (the current one)"
    sub.add_argument("dir", metavar="DIR", nargs="?", default=".", help=text)
    sub.add_argument("--all", action="store_true", help="download intermediate files too")


def _add_verbose(sub: argparse.ArgumentParser) -> None:
    text = "show internals too: the peers in charge of the workflow, details of placement"
    sub.add_argument("--verbose", action="store_true", help=text)


def _port(text: str) -> int:
    return _whole_number(text, 65535)


def _count(text: str) -> int:
    return _whole_number(text, 1_000_000)


def _listed(text: str) -> int:
    return _whole_number(text, LISTED_MAX)


def _whole_number(text: str, maximum: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {maximum:,}")
    return int(text)


# --------------------------------------------------------------------------- the cluster


def _up(options: argparse.Namespace, display: Display) -> int:
    from valence.workflow.quantities import seconds, size_bytes

    from . import up

    if options.peers > up.PEERS_MAX:
        raise ValueError(f"--peers must be at most {up.PEERS_MAX:,}")
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
            json=options.json,
        ),
        display,
    )


def _down(options: argparse.Namespace, display: Display) -> int:
    from . import up

    return up.down(display, options.json)


def _peers(options: argparse.Namespace, display: Display) -> int:
    peers = Client().peers()
    pids = {p["id"]: p["pid"] for p in local.peers() if local.alive(p)}
    for peer in peers:
        peer["pid"] = pids.get(peer["id"], peer.get("pid"))
    if options.json:
        return _json(display, peers)
    rows = []
    for p in peers:
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

    token = os.environ.get("VALENCE_TOKEN") or token_from_file() or local.token()
    if not token:
        raise Unreachable("no token found: start a cluster with `valence up`, or set VALENCE_TOKEN")
    if options.owner is not None:
        return _token_for(options.owner, token, options, display)
    if options.scope is not None or options.lasting is not None:
        raise ValueError(
            "--scope and --lasting need --owner: a new token belongs to somebody; without all "
            "three, the cluster's own token is printed, which may do everything"
        )
    if options.json:
        return _json(display, {"token": token})
    display.say(token)
    return 0


def _token_for(owner: str, token: str, options: argparse.Namespace, display: Display) -> int:
    from valence.peer import tokens
    from valence.workflow.quantities import seconds

    if token.startswith("v1."):
        raise ValueError("only the cluster's own token can make others: set VALENCE_TOKEN to that")
    scope = options.scope or "submit"
    ends_at = time.time() + seconds(options.lasting or "90d")
    made, token_id = tokens.make(token, owner, scope, ends_at)
    if options.json:
        row = {"token": made, "id": token_id, "owner": owner, "scope": scope}
        return _json(display, {**row, "ends_at": int(ends_at)})
    display.say(made)
    return 0


def _key(options: argparse.Namespace, display: Display) -> int:
    key = secrets.token_urlsafe(32)
    if options.json:
        return _json(display, {"key": key})
    display.say(key)
    return 0


# --------------------------------------------------------------------------- workflows


def _document(file: str) -> tuple[bytes, Path]:
    """A document, and the directory that its paths are relative to."""
    if file == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed")
        return sys.stdin.buffer.read(), Path()
    path = Path(file)
    return path.read_bytes(), path.parent


def _submit(options: argparse.Namespace, display: Display) -> int:
    from . import submission

    text, base = _document(options.file)
    # a mistake in the document is reported before any peer is asked
    body, kind, uploads = submission.prepare_text(text, base)
    client = Client()
    settings = {
        "time_scale": options.time_scale,
        "size_scale": options.size_scale,
        "strategy": options.strategy,
        "accept": options.accept,
    }
    workflow = client.send(body, kind, uploads, settings, options.key)
    if options.watch:
        return _follow(workflow, options, display)
    if options.json:
        return _json(display, workflow.view())
    display.say(workflow.id)
    if display.terminal:
        hint = f"follow it with: valence watch {workflow.id}"
        display.say(display.colour(hint, "dim"))
    return 0


def _plan(options: argparse.Namespace, display: Display) -> int:
    from . import submission
    from .gantt import chart

    body, kind, _ = submission.prepare_text(*_document(options.file))
    now = time.time()
    plan = Client().plan(body, kind)
    code = 0 if plan["feasible"] else TOO_LATE
    if options.json:
        _json(display, plan)
        return code
    if not plan["feasible"]:
        display.say(display.colour(f"the deadline can't be met: {plan['why']}", "failed"))
    if plan["ends_at"] is None:
        return code
    takes = show_seconds(max(0.0, plan["ends_at"] - now))
    spare_s = plan["deadline_at"] - plan["ends_at"]
    deadline = (
        f", {show_seconds(abs(spare_s))} {'before' if spare_s >= 0 else 'after'} its deadline"
    )
    far = spare_s > FAR_S  # the document has none
    display.say(f"{_many(len(plan['tasks']), 'task')}, done in {takes}{'' if far else deadline}")
    if plan["survives"] and not far:
        display.say("it leaves time for the loss of any one peer")
    for line in chart(plan["tasks"], now, display.columns):
        display.say(line)
    return code


def _ls(options: argparse.Namespace, display: Display) -> int:
    client = Client()
    workflows = client.workflows(options.limit, options.state)
    if client.unanswered:
        down = ", ".join(peer[:8] for peer in client.unanswered)
        print(f"the list is incomplete: these peers are down: {down}", file=sys.stderr)
    if options.json:
        return _json(display, workflows)
    if not workflows:
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
        for w in workflows
    ]
    display.table(("ID", "STATE", "NAME", "TASKS", "SUBMITTED", "TOOK"), rows)
    return 0


def _status(options: argparse.Namespace, display: Display) -> int:
    view = Client().workflow(options.id).view()
    if options.json:
        return _json(display, view)
    return _show(view, display, options.verbose)


def _show(view: dict[str, Any], display: Display, verbose: bool) -> int:
    end = view["ended_at"] or time.time()
    took = show_seconds(max(0.0, end - view["submitted_at"]))
    state = display.colour(view["state"], view["state"])
    ran = f", on {_many(view['peers'], 'peer')}" if view["peers"] else ""
    display.say(f"{view['name']} ({view['id']}): {state}, {took}{ran}")
    counts = (f"{n} {_STATES.get(state, state)}" for state, n in view["counts"].items())
    display.say(f"tasks: {', '.join(counts)}")
    if verbose:
        display.say(_keepers(view))
    _show_risk(view, display)
    read = _bytes_read(view)
    if read:
        display.say(f"inputs read: {read}")
    if view.get("promise"):
        _show_promise(view["promise"], display)
    elif view["late"]:
        display.say(display.colour("its deadline has passed", "failed"))
    _show_reasons(view, display)
    if view["reason"] and not view["failures"]:
        display.say(view["reason"])
    return 0


def _show_promise(promise: dict[str, Any], display: Display) -> None:
    """How its promise to be done by the deadline stands."""
    if promise["state"] == "none":
        display.say(f"no promise was made for its deadline: {promise['why']}")
    elif promise["state"] == "kept":
        early_s = max(0.0, promise["deadline_at"] - promise["ends_at"])
        kept = f"done {show_seconds(early_s)} before its deadline, as promised"
        display.say(display.colour(kept, "succeeded"))
    elif promise["state"] == "broken":
        broken = f"its promise was broken ({promise['cause']}): {promise['why']}"
        display.say(display.colour(broken, "failed"))
    else:
        _show_open_promise(promise, display)


def _show_open_promise(promise: dict[str, Any], display: Display) -> None:
    left = show_seconds(max(0.0, promise["deadline_at"] - time.time()))
    if promise["risk"]:
        display.say(display.colour(f"due in {left}, and at risk: {promise['risk']}", "waiting"))
        return
    slack = show_seconds(max(0.0, promise["slack_s"]))
    survives = "; it leaves time for the loss of any one peer" if promise["survives"] else ""
    display.say(f"promised: due in {left}, with {slack} to spare{survives}")
    if promise["rebooked"]:
        display.say(f"{_many(promise['rebooked'], 'task')} had to be booked again")


def _keepers(view: dict[str, Any]) -> str:
    others = [keeper[:8] for keeper in view["keepers"] if keeper != view["home"]]
    also = f"; other keepers of its journal: {', '.join(others)}" if others else ""
    return f"home: peer {view['home'][:8]}{also}"


def _show_risk(view: dict[str, Any], display: Display) -> None:
    if view.get("blocked"):
        display.say(display.colour(f"it can't go on: {view['blocked']}", "waiting"))
    elif view.get("risk"):
        display.say(display.colour(view["risk"], "dim"))


def _show_reasons(view: dict[str, Any], display: Display) -> None:
    """Why inputs, results and tasks are not there yet, and why tasks failed."""
    for name, reason in view["waiting_inputs"].items():
        display.say(f"input {name}: {reason}")
    for name, reason in view["delivering"].items():
        display.say(f"result {name}: {reason}")
    for row in view["waiting"]:
        display.say(f"{row['task']} is pending: {row['reason']}")
    for row in view["failures"]:
        display.say(display.colour(f"{row['task']}: {row['reason']}", "failed"))
        display.say(f"  its output: valence logs {view['id']} '{row['task']}'")


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _short(peer: str) -> str:
    """The beginning of a peer's id; a site, which a task queue names in its place, stays whole."""
    return peer if " " in peer else peer[:8]


def _tasks(options: argparse.Namespace, display: Display) -> int:
    tasks = list(Client().workflow(options.id).tasks())
    if options.json:
        return _json(display, tasks)
    rows = [
        (
            t["id"],
            t["state"],
            t["attempts"],
            _short(t["peer"] or ""),
            "" if t["seconds"] is None else show_seconds(t["seconds"]),
            t["reason"] if len(t["reason"]) <= 60 else t["reason"][:59] + "…",
        )
        for t in tasks
    ]
    display.table(("TASK", "STATE", "ATTEMPTS", "PEER", "TOOK", "REASON"), rows)
    return 0


def _files(options: argparse.Namespace, display: Display) -> int:
    files = Client().workflow(options.id).files()
    if options.json:
        return _json(display, files)
    rows = [
        (
            f["name"],
            "" if f["size"] is None else show_bytes(f["size"]),
            f["made_by"] or "input",
            "ready" if f["ready"] else "not yet",
            "result" if f["final"] else "",
        )
        for f in files
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


def _view_when_there(workflow: WorkflowHandle) -> dict[str, Any]:
    """A workflow's view, however long a majority of the peers that keep it is away."""
    reported = ""
    while True:
        try:
            return workflow.view()
        except Problem as problem:
            if problem.status != 503:
                raise
            if problem.detail != reported:
                reported = problem.detail
                print(f"{reported}; waiting", file=sys.stderr, flush=True)
        time.sleep(AWAY_S)


def _follow(workflow: WorkflowHandle, options: argparse.Namespace, display: Display) -> int:
    view = _view_when_there(workflow)
    try:
        if options.json:
            _follow_json(workflow, view["name"], display)
        else:
            _follow_shown(workflow, view, display, options.verbose)
    except KeyboardInterrupt:
        again = f"watch it with: valence watch {workflow.id}"
        print(f"{workflow.id} keeps running; {again}", file=sys.stderr)
        return 130
    view = workflow.view()
    if not options.json:
        _show(view, display, options.verbose)
        if view["state"] == "succeeded" and display.terminal:
            display.say(display.colour(f"fetch its results: valence get {workflow.id}", "dim"))
    if view["state"] != "succeeded":
        return 1
    return TOO_LATE if (view.get("promise") or {}).get("state") == "broken" else 0


def _follow_json(workflow: WorkflowHandle, name: str, display: Display) -> None:
    display.say(json.dumps({"type": "submitted", "workflow": workflow.id, "name": name}))
    for event in workflow.events():
        display.say(json.dumps(event))


def _follow_shown(
    workflow: WorkflowHandle, view: dict[str, Any], display: Display, verbose: bool
) -> None:
    progress = Progress(display, view, verbose)
    display.say(f"{view['name']} ({workflow.id}): {_many(view['tasks'], 'task')}")
    try:
        for event in workflow.events():
            progress.event(event)
    finally:
        progress.close()


def _logs(options: argparse.Namespace, display: Display) -> int:
    log = Client().workflow(options.id).log(options.task, options.attempt)
    if options.json:
        text = log.decode("utf-8", "replace")
        return _json(display, {"id": options.task, "attempt": options.attempt, "log": text})
    if display.terminal:
        display.out.write(plain(log.decode("utf-8", "replace").replace("\r\n", "\n")))
        display.out.flush()
    else:  # a file or a pipe gets the bytes unchanged
        sys.stdout.buffer.write(log)
        sys.stdout.buffer.flush()
    return 0


def _bytes_read(view: dict[str, Any]) -> str:
    """How many bytes of inputs were read, by where they were; empty if none were read."""
    places = {
        "local": "on the peer's own disk",
        "peer": "from other peers",
        "origin": "from outside",
    }
    count = view.get("bytes") or {}
    return ", ".join(
        f"{show_bytes(count[key])} {words}" for key, words in places.items() if count.get(key)
    )


def _why(options: argparse.Namespace, display: Display) -> int:
    task = Client().workflow(options.id).task(options.task)
    if options.json:
        keys = ("id", "state", "reason", "waiting_for", "slot", "history")
        return _json(display, {k: task[k] for k in keys})
    display.say(f"{task['id']}: {display.colour(task['state'], task['state'])}")
    if task["waiting_for"]:
        waits = task["state"] in ("waiting", "pending")
        display.say(f"{'waiting: ' if waits else ''}{task['waiting_for']}")
    elif task["reason"]:
        display.say(task["reason"])
    if task.get("slot"):
        display.say(_booked(task["slot"]))
    for attempt in task["history"]:
        _show_attempt(attempt, display, options.verbose)
    return 0


def _booked(slot: dict[str, Any]) -> str:
    """Where and when it is to run, as promised."""
    begins_s, ends_s = slot["start_at"] - time.time(), slot["end_at"] - time.time()
    takes = show_seconds(slot["end_at"] - slot["start_at"])
    if begins_s > 0:
        when = f"in {show_seconds(begins_s)}, for up to {takes}"
    else:
        when = f"now, until {show_seconds(ends_s)} from now" if ends_s > 0 else "until a moment ago"
    return f"booked on peer {slot['peer'][:8]}: {when}"


def _show_attempt(attempt: dict[str, Any], display: Display, verbose: bool) -> None:
    ended = f": {attempt['reason']}" if attempt["reason"] else ""
    display.say(
        f"attempt {attempt['number']} on {_short(attempt['peer'])}: {attempt['state']}{ended}"
    )
    read = _bytes_read(attempt)
    if read:
        display.say(f"  inputs: {read}")
    placement = attempt["placement"]
    display.say(f"  {placement['strategy']}: {_placed(placement, verbose)}")
    for row in placement["asked"]:
        answer = f"offered {row['offered']}"
        if row["refusal"]:
            answer += f" ({row['refusal']})"
        mark = "→" if row["peer"] == attempt["peer"] else " "
        display.say(f"  {mark} {row['peer'][:8]} {answer}")


def _placed(placement: dict[str, Any], verbose: bool) -> str:
    parts = []
    if placement["matching"] is not None:
        parts.append(f"{placement['matching']} of {placement['known']} peers match")
    why = placement["why"]
    if why and (verbose or placement["strategy"] not in PAPERS):
        parts.append(why)
    if placement.get("sought_s") is not None:
        parts.append(f"found within {1000 * placement['sought_s']:.3g} ms")
    return "; ".join(parts) or "placed"


def _get(options: argparse.Namespace, display: Display) -> int:
    workflow = Client().workflow(options.id)
    target = Path(options.dir)
    files = workflow.files()
    wanted = [file for file in files if file["final"] or (options.all and file["made_by"])]
    fetched = _fetch_files(workflow, wanted, target, options, display)
    missing = len(wanted) - len(fetched)
    fetched += _fetch_values(workflow, {file["name"] for file in files}, target, options, display)
    if options.json:
        _json(display, fetched)
    elif not fetched and not missing:
        display.error(f"nothing to download; see its files with: valence files {workflow.id}")
    return 1 if missing or not fetched else 0


def _fetch_files(
    workflow: WorkflowHandle,
    wanted: list[dict[str, Any]],
    target: Path,
    options: argparse.Namespace,
    display: Display,
) -> list[dict[str, Any]]:
    fetched = []
    for file in wanted:
        if not file["ready"]:
            display.error(f"{file['name']} is not there: {file['made_by']} has not succeeded")
            continue
        row = _fetch(workflow, file["name"], target)
        fetched.append(row)
        if not options.json:
            display.say(f"{row['path']} ({show_bytes(row['size'])})")
    return fetched


def _fetch(workflow: WorkflowHandle, name: str, target: Path) -> dict[str, Any]:
    path = target / name
    if not path.resolve().is_relative_to(target.resolve()):
        raise ValueError(f"{name} would be written outside {target}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return {"name": name, "path": str(path), "size": workflow.download(name, path)}


def _fetch_values(
    workflow: WorkflowHandle,
    taken: set[str],
    target: Path,
    options: argparse.Namespace,
    display: Display,
) -> list[dict[str, Any]]:
    """The values of calls as one JSON file, beside it a pickle for each that JSON can't express."""
    values, others = workflow.json_values()
    if not values and not others:
        return []
    target.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(others):
        kind, data = workflow.raw_value(name)
        if kind == "json":
            values[name] = json.loads(data)
        else:  # stays a pickle: to load it is to run code that its owner chose
            other = target / _unused(taken, f"value-{number}.pickle")
            other.write_bytes(data)
            values[name] = {"pickle": other.name}
    path = target / _unused(taken, "values.json")
    path.write_text(json.dumps(values, indent=2) + "\n")
    if not options.json:
        listed = ", ".join(list(values)[:5]) + ", …" * (len(values) > 5)
        display.say(f"{path} (the values of {listed})")
    return [{"name": path.name, "path": str(path), "size": path.stat().st_size}]


def _unused(taken: set[str], name: str) -> str:
    """A name that no file of the workflow has."""
    while name in taken:
        name = f"valence-{name}"
    return name


def _json(display: Display, value: Any) -> int:
    display.say(json.dumps(value, indent=2))
    return 0
