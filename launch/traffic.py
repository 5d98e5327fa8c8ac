"""Releases of weights: gate, canary, rollback, and the router between two servers. docs/realtime.md has the whole way.

    python -m launch.traffic begin --workdir=runs/live --weights=runs/live/weights --version=12 --serving=11
    python -m launch.traffic gate --workdir=runs/live --anchor=runs/a/stages/evaluate_after.json \\
        --candidate=runs/b/stages/evaluate_after.json
    python -m launch.traffic canary --workdir=runs/live --labels=FILE --server=http://127.0.0.1:8001
    python -m launch.traffic rollback --workdir=runs/live --reason="users cannot undo"
    python -m launch.traffic status --workdir=runs/live
    python -m launch.traffic route --workdir=runs/live --port=8000 --anchor=http://127.0.0.1:8001 \\
        --candidate=http://127.0.0.1:8002

begin opens a release of a version that exists in a folder of versions (rl.publish of a trainer); the version that
serves makes it an A/A test, which comes before the first canary. gate compares two evaluations of launch.evaluate.
canary starts, looks once at the labels so far, and goes on, waits, holds or rolls back; run it again and again. A held
release goes on with --approve=REASON, or ends with gate --refuse=REASON. rollback publishes the weights that served
before as a new version. Every command but route ends with a line of JSON on stdout.
"""

import getpass

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts
from launch.json_result import print_json

COMMANDS = {
    "begin": ("weights", "version", "serving", "learner", "run"),
    "gate": ("anchor", "candidate", "margin", "approve", "refuse"),
    "canary": ("labels", "server", "router", "horizon_s", "harm", "planned_users", "skip_aa", "approve"),
    "rollback": ("to", "reason"),
    "route": ("host", "port", "anchor", "candidate"),
    "status": (),
}
"""Command -> the flags that it takes beside --workdir."""


def define(values):
    string = lambda name, meaning: absl_flags.DEFINE_string(name, None, meaning, flag_values=values)  # noqa: E731
    integer = lambda name, meaning: absl_flags.DEFINE_integer(name, None, meaning, flag_values=values)  # noqa: E731
    number = lambda name, meaning: absl_flags.DEFINE_float(name, None, meaning, flag_values=values)  # noqa: E731
    string("workdir", "The folder whose releases/ has a file per release.")
    string("weights", "begin: the folder or URL of versions of the weights.")
    integer("version", "begin: the candidate; the version that serves is an A/A test.")
    integer("serving", "begin: the version that serves now; the default is what the last release left.")
    string("learner", "begin: RUN/checkpoints/rl of the learner, whose optimizer goes back with the weights.")
    string("run", "begin: the run whose config the release names by its hash.")
    string(
        "anchor", "gate: RUN/stages/evaluate_WHICH.json of the version that serves. route: the address of its server."
    )
    string("candidate", "gate: the same of the candidate. route: the address of its server.")
    number("margin", "gate: by which the candidate may be worse in no suite; the default is 0.03.")
    string("approve", "gate, canary: why a held release goes on.")
    string("refuse", "gate: why a held release ends.")
    string("labels", "canary: a file of JSON lines {user, arm, fraction, value, metric}, of all users so far.")
    absl_flags.DEFINE_multi_string(
        "server",
        [],
        "canary: a server of the candidate, which must have the version; may be repeated.",
        flag_values=values,
    )
    string("router", "canary: the address of the router, which knows errors and latency of both arms.")
    number("horizon_s", "canary: the age of the labels in seconds, which a step takes at least; the default is 3600.")
    number("harm", "canary: an effect below minus this rolls back; the default is 0.")
    integer("planned_users", "canary: users after which the intervals are tightest; the default is 2000.")
    absl_flags.DEFINE_boolean("skip_aa", False, "canary: starts without an A/A test before.", flag_values=values)
    integer("to", "rollback: the version; the default is the anchor of the release.")
    string("reason", "rollback: why, for the records.")
    string("host", "route: the address to listen on; the default is 127.0.0.1.")
    integer("port", "route: the port to listen on; the default is 8000.")
    return ("workdir",)


def main(values, words):
    if len(words) != 1 or words[0] not in COMMANDS:
        raise UserError(f"the command is {' '.join(words) or 'missing'}; use one of {', '.join(COMMANDS)}")
    (command,) = words
    for name in (name for names in COMMANDS.values() for name in names):
        if values[name].present and name not in COMMANDS[command]:
            raise UserError(f"--{name} is not a flag of {command}; --help says what the commands take")
    if command == "route":
        from composer_jax.realtime.release.router import route

        for name in ("anchor", "candidate"):
            _require(values, name, "route")
        route(values.workdir, values.anchor, values.candidate, values.host or "127.0.0.1", values.port or 8000)
        return
    from composer_jax.realtime.release.releases import read_releases
    from composer_jax.realtime.release.steps import status

    if command != "status":
        _change(command, values)
    print_json(status(read_releases(values.workdir)), None)


def _change(command, values):
    from composer_jax.realtime.release.releases import ReleaseFolder
    from composer_jax.realtime.release.steps import approve, refuse

    with ReleaseFolder(values.workdir, by=getpass.getuser(), learner=_learner) as folder:
        if values.approve is not None:
            approve(folder, values.approve)
        elif values.refuse is not None:
            refuse(folder, values.refuse)
        else:
            {"begin": _begin, "gate": _gate, "canary": _canary, "rollback": _rollback}[command](folder, values)


def _begin(folder, values):
    from composer_jax.realtime.release.steps import provenance

    for name in ("weights", "version"):
        _require(values, name, "begin")
    folder.adopt(
        values.weights,
        values.version,
        values.serving,
        learner=values.learner or "",
        hashes=provenance(values.run),
    )


def _gate(folder, values):
    from composer_jax.realtime.release.gate import GateRules, read_evaluation
    from composer_jax.realtime.release.steps import gate_step

    anchor, candidate = (read_evaluation(file) if file else None for file in (values.anchor, values.candidate))
    gate_step(folder, anchor, candidate, GateRules(**_given(values, "margin")))


def _canary(folder, values):
    from composer_jax.realtime.release.canary import CanaryRules, read_rows, read_service
    from composer_jax.realtime.release.steps import canary_step

    canary_step(
        folder,
        read_rows(values.labels) if values.labels else [],
        CanaryRules(**_given(values, "horizon_s", "harm", "planned_users")),
        servers=values.server,
        service=read_service(values.router) if values.router else None,
        skip_aa=values.skip_aa,
    )


def _rollback(folder, values):
    _require(values, "reason", "rollback")
    folder.roll_back(values.reason, values.to)


def _learner(checkpoints):
    from composer_jax.stages.released_learner import LearnerCheckpoints

    return LearnerCheckpoints(checkpoints)


def _given(values, *names):
    return {name: values[name].value for name in names if values[name].value is not None}


def _require(values, name, command):
    if values[name].value is None:
        raise UserError(f"{command} needs --{name}: {values[name].help}")


if __name__ == "__main__":
    flags.run(main, define=define, arguments="begin|gate|canary|rollback|status|route", processes=hosts.NO_DEVICES)
