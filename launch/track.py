"""Measures what becomes of an agent's changes in a git working tree, and tells the server that the agent talked to.

    python -m launch.track --session=ID --server=URL -- COMMAND...

runs the agent's command, and then counts, 10 minutes, 1 hour and 24 hours after the agent stopped, how many of its
lines are still there. ID is the X-Session-ID of the agent's requests. Ctrl-C ends the waiting; `follow` continues it.
Where the agent is no command, or nothing shall wait:

    python -m launch.track --session=ID --server=URL start     # before the agent changes files
    python -m launch.track --session=ID stop                   # when it has stopped
    python -m launch.track --session=ID follow                 # waits and measures; or, instead of that,
    python -m launch.track check                               # every minute from cron, or by the hooks of
    python -m launch.track install_hook                        # git, which remove_hook removes

    python -m launch.track --session=ID test -- pytest -q      # the user's tests: their exit code, before and after
    python -m launch.track --session=ID mark                   # where several agents work: the last change was ID's
    python -m launch.track status
    python -m launch.track --session=ID forget                 # deletes what is remembered of the session

Sent are counts and hashes, never code: docs/realtime_track.md. The server has to run with --traffic. A command that is
called like one of these words is given as `run -- COMMAND...`.
"""

import functools
import os
import sys
from pathlib import Path

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts


def define(values):
    string = lambda name, default, meaning: absl_flags.DEFINE_string(  # noqa: E731
        name, default, meaning, flag_values=values
    )
    string("repository", ".", "A folder of the git working tree that the agent changes.")
    string("session", "", "The X-Session-ID of the agent's requests.")
    string("server", "", "Address of the server that the agent talks to, such as http://127.0.0.1:8000.")
    string("api_key", None, "The API key that the agent uses; the default is the variable COMPOSER_JAX_API_KEY.")
    string("turn", "", "Id of the answer that the events are about; without one, the session as a whole.")
    string("test_command", "", "A shell command that tests the user's code; run before the agent and after it.")
    return ()


def main(values, words):
    from composer_jax.realtime.track.git_hooks import install_hooks, remove_hooks
    from composer_jax.realtime.track.tracker import Tracker

    tracker = Tracker(Path(values.repository), report=functools.partial(print, flush=True))
    session = values.session
    key = os.environ.get("COMPOSER_JAX_API_KEY", "") if values.api_key is None else values.api_key
    commands = {
        "start": lambda: tracker.start(session, values.server, key, values.turn, values.test_command),
        "mark": lambda: tracker.mark(session),
        "stop": lambda: tracker.stop(session, values.test_command),
        "check": lambda: tracker.check(session or None),
        "follow": lambda: tracker.follow(session),
        "forget": lambda: tracker.forget(session),
        "status": lambda: print(*(tracker.status() or [f"no session is tracked in {tracker.tree.root}"]), sep="\n"),
        "install_hook": lambda: print("wrote", *install_hooks(tracker.tree.root)),
        "remove_hook": lambda: print("changed", *remove_hooks(tracker.tree.root) or ["no file"]),
    }
    first, *rest = words or [""]
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not first:
        raise UserError(f"a command is missing: -- COMMAND... to run the agent, or one of {', '.join(commands)}, test")
    if not session and first not in ("check", "status", "install_hook", "remove_hook"):
        raise UserError("--session is missing: the X-Session-ID of the agent's requests")
    if first in commands and not rest:
        commands[first]()
    elif first == "test":
        if not rest:
            raise UserError("a test command is missing: test -- COMMAND...")
        sys.exit(tracker.test(session, rest))
    elif first in commands:
        raise UserError(
            f"unexpected argument {rest[0]!r} after {first}; to run a command of that name: run -- {first} ..."
        )
    else:
        command = rest if first == "run" else words
        if not command:
            raise UserError("a command is missing: run -- COMMAND...")
        sys.exit(tracker.run(session, command, values.server, key, values.turn, values.test_command))


if __name__ == "__main__":
    flags.run(main, define=define, arguments="COMMAND | start | stop | ...", processes=hosts.NO_DEVICES)
