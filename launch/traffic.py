"""Production traffic: labels of sessions, and releases of weights with a gate, a canary and a way back.

    python -m launch.traffic label --workdir=runs/live --checkpoint=patches:runs/live/weights
    python -m launch.traffic batch --workdir=runs/live --min_sessions=4000
    python -m launch.traffic train --workdir=runs/live
    python -m launch.traffic begin --workdir=runs/live --weights=runs/live/weights --version=12 --serving=11
    python -m launch.traffic gate --workdir=runs/live --anchor=runs/a/stages/evaluate_after.json \\
        --candidate=runs/b/stages/evaluate_after.json
    python -m launch.traffic canary --workdir=runs/live --server=http://127.0.0.1:8002 \\
        --traffic=runs/live/anchor --traffic=runs/live/candidate
    python -m launch.traffic rollback --workdir=runs/live --reason="users cannot undo"
    python -m launch.traffic status --workdir=runs/live
    python -m launch.traffic cycle --workdir=runs/live --every=5h --server=http://127.0.0.1:8002 \\
        --traffic=runs/live/anchor --traffic=runs/live/candidate
    python -m launch.traffic route --workdir=runs/live --port=8000 --anchor=http://127.0.0.1:8001 \\
        --candidate=http://127.0.0.1:8002
    python -m launch.traffic forget --workdir=runs/live --user=NAME
    python -m launch.traffic simulate --config=tiny:traffic --workdir=runs/traffic --cycles=6 --sessions=256

label measures what became of the sessions that are old enough. begin opens a release of a version that exists in a
folder of versions (rl.publish of a trainer); the version that serves makes it an A/A test, which comes before the first
canary. Without --version it opens one that collects sessions; batch claims those that can be trained for it and writes
WORKDIR/batches, or says how many are missing. train makes the candidate from that batch, with the learner of the run in
WORKDIR. gate compares two evaluations of launch.evaluate; without their files it evaluates both versions with the
suites of the run in WORKDIR. canary starts, looks once at the labels so far, and goes on, waits, holds or rolls back;
run it again and again. A held release goes on with --approve=REASON. One that has not passed the gate ends with gate
--refuse=REASON. rollback publishes the weights that served before as a new version. cycle does all of it by itself,
release after release; it says for what it waits, and after a kill the same command goes on. train, gate and cycle
take fields of the config's section traffic, such as --config.traffic.learning_rate=1e-6, in place of what the run began
with. status also writes
WORKDIR/report.html. All commands but label, cycle and route end with a line of JSON on stdout. docs/realtime.md has the
way from the first server to a release.
"""

import dataclasses
import getpass
import os
import re
import sys
from pathlib import Path

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts
from launch.json_result import print_json

BATCH = {
    "min_sessions": int,
    "lag": int,
    "baseline": str,
    "cap_user": float,
    "cap_repository": float,
    "cap_organisation": float,
    "gamma": float,
    "advantage_limit": float,
}
"""Fields of BatchRules that are flags of batch."""
SIMULATE = "simulate"
"""The command that trains a model, and so has a config."""
OF_RUN = ("train", "gate", "cycle")
"""Commands that take --config.traffic.FIELD, in place of what the config of the run in --workdir says."""
COMMANDS = {
    "label": ("traffic", "horizon_s", "checkpoint", "signal", "judge", "judge_model", "judge_key"),
    "forget": ("traffic", "session", "user"),
    "batch": ("traffic", "horizon_s", *BATCH),
    "begin": ("weights", "version", "serving", "learner", "run"),
    "train": (),
    "gate": ("anchor", "candidate", "margin", "approve", "refuse"),
    "canary": ("traffic", "labels", "server", "router", "horizon_s", "harm", "planned_users", "skip_aa", "approve"),
    "rollback": ("to", "reason", "leave_learner"),
    "cycle": ("traffic", "every", "server", "router", "skip_aa", "signal", "judge", "judge_model", "judge_key"),
    "route": ("host", "port", "anchor", "candidate"),
    "status": ("traffic", "horizon_s"),
    SIMULATE: ("cycles", "sessions"),
}
"""Command -> the flags that it takes beside --workdir."""
CYCLES, SESSIONS = 6, 256
HORIZON_S = 3600.0
"""The default age of labels."""
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def define(values):
    string = lambda name, meaning: absl_flags.DEFINE_string(name, None, meaning, flag_values=values)  # noqa: E731
    integer = lambda name, meaning: absl_flags.DEFINE_integer(name, None, meaning, flag_values=values)  # noqa: E731
    number = lambda name, meaning: absl_flags.DEFINE_float(name, None, meaning, flag_values=values)  # noqa: E731
    several = lambda name, meaning: absl_flags.DEFINE_multi_string(name, [], meaning, flag_values=values)  # noqa: E731
    string("workdir", "The folder whose releases/ has a file per release.")
    several(
        "traffic",
        "label, batch, canary, cycle, forget, status: a folder that launch.serve --traffic writes; may be repeated. "
        "The default is all such folders directly in WORKDIR.",
    )
    string("checkpoint", "label: weights whose tokenizer and template wrote the traffic; without, texts are not read.")
    several("signal", "label, cycle: NAME=MODULE:FUNCTION of a signal of your own; may be repeated.")
    string("judge", "label, cycle: address of a model that judges follow-ups, up to /v1; without, rules do.")
    string("judge_model", "label, cycle: the name of that model.")
    string("judge_key", "label, cycle: its API key; the default is COMPOSER_JAX_API_KEY of the environment.")
    string("session", "forget: X-Session-ID of the session that is deleted.")
    string("user", "forget: X-User-ID, or the hash, of the user whose sessions are deleted.")
    string("weights", "begin: the folder or URL of versions of the weights.")
    integer("version", "begin: the candidate; the version that serves is an A/A test. Without, one is to be trained.")
    integer("serving", "begin: the version that serves now; the default is what the last release left.")
    string("learner", "begin: RUN/checkpoints/rl of the learner, whose optimizer goes back with the weights.")
    string("run", "begin: the run whose config the release names by its hash.")
    string(
        "anchor", "gate: RUN/stages/evaluate_WHICH.json of the version that serves. route: the address of its server."
    )
    string("candidate", "gate: the same of the candidate. route: the address of its server.")
    number("margin", "gate: by which the candidate may be worse in no suite; the default is 0.03.")
    string("approve", "gate, canary: why a held release goes on.")
    string("refuse", "gate: why a release ends that has not passed the gate.")
    string("labels", "canary: a file of JSON lines {user, arm, fraction, value, metric}, of all users so far.")
    several("server", "canary, cycle: a server of the candidate, which must have the version; may be repeated.")
    string("every", "cycle: the least time from the beginning of one release to that of the next; the default is 5h.")
    string("router", "canary, cycle: the address of the router, which knows errors and latency of both arms.")
    number(
        "horizon_s",
        "label, batch, canary, status: the age of the labels in seconds, which a canary's step takes at least; the "
        "default is 3600.",
    )
    number("harm", "canary: an effect below minus this rolls back; the default is 0.")
    integer("planned_users", "canary: users after which the intervals are tightest; the default is 2000.")
    absl_flags.DEFINE_boolean("skip_aa", False, "canary, cycle: starts without an A/A test before.", flag_values=values)
    integer("to", "rollback: the version; the default is the anchor of the release.")
    string("reason", "rollback: why, for the records.")
    absl_flags.DEFINE_boolean(
        "leave_learner", False, "rollback: the learner, whose states are lost, stays as it is.", flag_values=values
    )
    for name, kind in BATCH.items():
        define_one = {int: integer, float: number, str: string}[kind]
        define_one(name, f"batch: {name} of BatchRules (docs/realtime_learning.md).")
    string("host", "route: the address to listen on; the default is 127.0.0.1.")
    integer("port", "route: the port to listen on; the default is 8000.")
    integer("cycles", f"simulate: releases in all, those of earlier calls included; the default is {CYCLES}.")
    integer("sessions", f"simulate: sessions of each cycle; the default is {SESSIONS}.")
    return ("workdir",)


def define_with_config(values):
    return (*define(values), "config")


def has_config(argv):
    """Returns whether a command of a run is given fields of its config."""
    return any(word in OF_RUN for word in argv[1:]) and any(word.startswith("--config") for word in argv[1:])


def main(values, words):
    if len(words) != 1 or words[0] not in COMMANDS:
        raise UserError(f"the command is {' '.join(words) or 'missing'}; use one of {', '.join(COMMANDS)}")
    (command,) = words
    for name in (name for names in COMMANDS.values() for name in names):
        if values[name].present and name not in COMMANDS[command]:
            raise UserError(f"--{name} is not a flag of {command}; --help says what the commands take")
    from composer_jax.storage.bucket import is_url

    if is_url(values.workdir):
        raise UserError(
            f"--workdir={values.workdir} is a bucket; releases and traffic need locks and a database, so use a local "
            "folder (the versions of the weights may lie in a bucket)."
        )
    if command == "route":
        from composer_jax.realtime.release.router import route

        for name in ("anchor", "candidate"):
            _require(values, name, "route")
        route(
            values.workdir,
            values.anchor,
            values.candidate,
            values.host or "127.0.0.1",
            8000 if values.port is None else values.port,
        )
        return
    if command in ("label", "forget", "cycle", SIMULATE):
        {"label": _label, "forget": _forget, "cycle": _cycle, SIMULATE: _simulate}[command](values)
        return
    if command == "train":
        _train(values)
    elif command == "gate" and _is_gated_by_run(values):
        _gate_by_run(values)
    elif command != "status":
        _change(command, values)
    _show(command, values)


def _show(command, values):
    """Prints the releases; the command `status` also shows the traffic and writes the page."""
    from composer_jax.realtime.release.releases import read_releases
    from composer_jax.realtime.release.steps import status

    shown = status(read_releases(values.workdir))
    if command == "status":
        from composer_jax.stages.traffic import keep_correlations, traffic_counts, write_traffic_page

        folders = _folders(values)
        page = write_traffic_page(values.workdir, folders, _horizon(values))
        shown |= {"traffic": traffic_counts(folders), "page": str(page)}
        shown["keep_correlations"] = keep_correlations(folders)
    print_json(shown, None)


def _folders(values, *, is_needed=False, compares_users=False):
    """The folders of traffic; none if WORKDIR has none and none is named."""
    from composer_jax.stages.traffic import default_folders, traffic_folders

    if not (is_needed or values.traffic or default_folders(values.workdir)):
        return []
    return traffic_folders(values.workdir, values.traffic, compares_users=compares_users)


def _horizon(values):
    return HORIZON_S if values.horizon_s is None else values.horizon_s


def _label(values):
    from composer_jax.stages.traffic import describe_labels, label_traffic

    judge, folders = _judge(values), _folders(values, is_needed=True)
    runs = label_traffic(folders, _horizon(values), values.checkpoint or "", judge, _own_signals(values))
    for folder, run in zip(folders, runs, strict=True):
        print(describe_labels(folder, run))


def _simulate(values):
    from composer_jax.stages.run import Run
    from composer_jax.stages.traffic_simulation import simulate

    config = values.config
    if not config.rl.publish:
        config.rl.publish = str(Path(values.workdir).expanduser().absolute() / "weights")
    with Run(config, values.workdir) as run:
        cycles, sessions = (values[name].value for name in ("cycles", "sessions"))
        rows = simulate(run, CYCLES if cycles is None else cycles, SESSIONS if sessions is None else sessions)
    print_json({"cycles": rows}, None)


def _judge(values):
    from composer_jax.stages.traffic import judge_at

    key = os.environ.get("COMPOSER_JAX_API_KEY", "") if values.judge_key is None else values.judge_key
    return judge_at(values.judge or "", values.judge_model or "", key)


def _own_signals(values):
    return dict(signal.partition("=")[::2] for signal in values.signal)


def _forget(values):
    from composer_jax.stages.traffic import forget_traffic

    names = forget_traffic(
        values.workdir, _folders(values, is_needed=True), session=values.session or "", user=values.user or ""
    )
    print_json({"forgotten": names}, None)


def _train(values):
    from composer_jax.stages.traffic_cycle import open_releases, train_labelled

    with open_releases(values.workdir, by=getpass.getuser(), config=_config(values)) as (run, folder):
        train_labelled(run, folder)


def _cycle(values):
    from composer_jax.stages.traffic_cycle import Deployment, run_cycle

    _require(values, "server", "cycle")
    every_s = _seconds(values.every or "5h")
    deployment = Deployment(
        _folders(values, is_needed=True),
        servers=values.server,
        router=values.router or "",
        judge=_judge(values),
        own_signals=_own_signals(values),
        skip_aa=values.skip_aa,
        every_s=every_s,
    )
    run_cycle(values.workdir, deployment, by=getpass.getuser(), config=_config(values))


def _config(values):
    """The config of the command line; None without --config."""
    return values.config if "config" in values else None


def _seconds(duration):
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", duration)
    if match is None:
        raise UserError(f"--every={duration} is no duration; use a number with one of {', '.join(UNITS_S)}, as in 5h.")
    return float(match[1]) * UNITS_S[match[2]]


def _change(command, values):
    from composer_jax.realtime.release.releases import ReleaseFolder
    from composer_jax.realtime.release.steps import approve, refuse

    leaves = values.leave_learner
    with ReleaseFolder(values.workdir, by=_user_name(), learner=_learner, leaves_learner=leaves) as folder:
        if values.approve is not None:
            approve(folder, values.approve)
        elif values.refuse is not None:
            refuse(folder, values.refuse)
        else:
            act = {"batch": _batch, "begin": _begin, "gate": _gate, "canary": _canary, "rollback": _rollback}
            act[command](folder, values)


def _begin(folder, values):
    from composer_jax.realtime.release.steps import provenance

    _require(values, "weights", "begin")
    more = {"learner": values.learner or "", "hashes": provenance(values.run)}
    if values.version is None:
        folder.begin(values.weights, values.serving, **more)
    else:
        folder.adopt(values.weights, values.version, values.serving, **more)


def _batch(folder, values):
    from composer_jax.stages.traffic_batch import describe_progress, learner_rows, make_batch, rules_of_run

    rules = dataclasses.replace(rules_of_run(values.workdir), **_given(values, "horizon_s", *BATCH))
    traffic = _folders(values, is_needed=True)
    progress = make_batch(folder, values.workdir, traffic, rules, learner_rows(values.workdir))
    print(describe_progress(folder.last, progress, rules), file=sys.stderr)


def _gate(folder, values):
    from composer_jax.realtime.release.gate import GateRules
    from composer_jax.realtime.release.steps import gate_step

    gate_step(folder, values.anchor, values.candidate, GateRules(**_given(values, "margin")))


def _is_gated_by_run(values):
    """Whether the gate evaluates by itself: no evaluation is named, and the workdir is that of a run."""
    named = any(values[name].value is not None for name in ("anchor", "candidate", "approve", "refuse"))
    return not named and (Path(values.workdir).expanduser() / "config.json").exists()


def _gate_by_run(values):
    """Evaluates both versions with the suites of the run in the workdir."""
    from composer_jax.stages.traffic_cycle import gate_trained, open_releases

    with open_releases(values.workdir, by=getpass.getuser(), config=_config(values)) as (run, folder):
        gate_trained(run, folder, **_given(values, "margin"))


def _canary(folder, values):
    from composer_jax.realtime.release.canary import CanaryRules, read_rows, read_service
    from composer_jax.realtime.release.steps import canary_step

    if values.labels and values.traffic:
        raise UserError(f"--labels={values.labels} and --traffic are two sources of labels; give one of the two.")
    if folder.last.state == "gated":
        _require(values, "server", "canary")
    canary_step(
        folder,
        read_rows(values.labels) if values.labels else _canary_labels(folder, values),
        CanaryRules(**_given(values, "horizon_s", "harm", "planned_users")),
        servers=values.server,
        service=read_service(values.router) if values.router else None,
        skip_aa=values.skip_aa,
    )


def _canary_labels(folder, values):
    from composer_jax.stages.traffic import rows_of_canary

    if not folder.releases or not (folders := _folders(values, compares_users=True)):
        return []
    return rows_of_canary(folders, _horizon(values), folder.last)


def _rollback(folder, values):
    _require(values, "reason", "rollback")
    if folder.resumed_rollback and values.to in (None, folder.last.rollback["to"]):
        return  # opening the folder has done what an earlier command was told
    folder.roll_back(values.reason, values.to)


def _user_name():
    """The name of the user who decides, or the number where it has none, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # KeyError before Python 3.13
        return f"user {os.getuid()}"


def _learner(checkpoints):
    from composer_jax.stages.released_learner import LearnerCheckpoints

    return LearnerCheckpoints(checkpoints)


def _given(values, *names):
    return {name: values[name].value for name in names if values[name].value is not None}


def _require(values, name, command):
    if values[name].value in (None, []):
        raise UserError(f"{command} needs --{name}: {values[name].help}")


if __name__ == "__main__":
    if SIMULATE in sys.argv[1:]:
        flags.run(main, define=define_with_config, arguments=SIMULATE, processes=hosts.SINGLE_PROCESS)
    if has_config(sys.argv):
        flags.run(main, define=define_with_config, arguments="|".join(OF_RUN), processes=hosts.NO_DEVICES)
    flags.run(main, define=define, arguments="|".join(COMMANDS), processes=hosts.NO_DEVICES)
