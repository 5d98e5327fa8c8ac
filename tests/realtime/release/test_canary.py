"""Canary: sticky arms, decisions from labels of simulated users, and what the servers must answer."""

import http.server
import json
import threading

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.release.canary import (
    LEAST_ANSWERED,
    CanaryRules,
    LabelRow,
    ServiceSample,
    arm_of,
    decide,
    look,
    next_fraction,
    read_rows,
    require_version,
)

RULES = CanaryRules(horizon_s=100)


def labels(effect: float, users: int, fraction: float = 0.25, *, seed: int = 0, salt: str = "s") -> list[LabelRow]:
    """One to three labels per user, around the user's own mean."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(users):
        arm = arm_of(salt, f"user{i}", fraction)
        mean = rng.normal(0.5, 0.2) + (effect if arm == "candidate" else 0)
        rows += [LabelRow(f"user{i}", arm, fraction, float(rng.normal(mean, 0.1))) for _ in range(1 + i % 3)]
    return rows


def test_arms_stay_while_the_fraction_rises_and_change_with_the_salt():
    users = [f"u{i}" for i in range(20_000)]
    before: set[str] = set()
    for fraction in (0.01, 0.05, 0.25, 1.0):
        having = {user for user in users if arm_of("salt", user, fraction) == "candidate"}
        assert before <= having and len(having) == pytest.approx(fraction * len(users), rel=0.15)
        before = having
    first = {user for user in users if arm_of("salt", user, 0.05) == "candidate"}
    other = {user for user in users if arm_of("other", user, 0.05) == "candidate"}
    assert len(first & other) < 0.1 * len(first)


def test_the_steps():
    steps, fraction = [], 0.0
    while (fraction := next_fraction(fraction, is_aa=False)) is not None:
        steps.append(fraction)
    assert steps == [0.01, 0.05, 0.25]
    assert next_fraction(0.0, is_aa=True) == 0.5 and next_fraction(0.5, is_aa=True) is None


@pytest.mark.parametrize(("effect", "decision"), [(-0.15, "roll back"), (0.0, "wait"), (0.15, "wait")])
def test_harm_goes_back_at_once(effect, decision):
    seen = look(labels(effect, 2000), RULES)
    assert seen["decision"] == decision and bool(seen["reasons"]) == (decision != "wait")
    row = seen["metrics"]["reward"]
    assert abs(row["effect"] - effect) < row["half_width"] < 0.1
    assert json.loads(json.dumps(seen)) == seen


def test_a_harm_that_is_allowed_does_not_go_back():
    assert look(labels(-0.15, 2000), CanaryRules(harm=0.2))["decision"] == "wait"


def test_a_step_takes_a_horizon_and_users():
    assert decide(look(labels(0, 2000), RULES), RULES, 99)[0] == "wait"
    assert decide(look(labels(0, 2000), RULES), RULES, 100)[0] == "advance"
    assert decide(look(labels(0, 60), RULES), RULES, 100)[0] == "wait"
    assert decide(look([], RULES), RULES, 1000)[0] == "wait"


def test_an_a_a_test_is_silent_unless_the_arms_differ():
    assert look(labels(0, 2000, 0.5), RULES, is_aa=True)["decision"] == "wait"
    for effect in (-0.15, 0.15):
        assert look(labels(effect, 2000, 0.5), RULES, is_aa=True)["decision"] == "hold"


def test_arms_of_wrong_sizes_are_held():
    rows = [row._replace(fraction=0.3) for row in labels(0, 3000, 0.25)]
    seen = look(rows, RULES)
    assert (seen["decision"], seen["held_by"]) == ("hold", ["arm sizes"])


def test_a_few_users_say_nothing_about_the_sizes_of_arms():
    rows = [LabelRow(f"u{i}", "candidate" if i == 5 else "anchor", 0.01, 0.5) for i in range(6)]
    assert look(rows, RULES)["decision"] == "wait"


def test_what_a_person_has_approved_does_not_hold_again_and_harm_still_goes_back():
    rows = [row._replace(fraction=0.3) for row in labels(0, 3000, 0.25)]
    assert look(rows, RULES, approved={"arm sizes"})["decision"] == "wait"
    seen = look(labels(0.15, 2000, 0.5), RULES, is_aa=True, approved={"arm sizes"})
    assert (seen["decision"], seen["held_by"]) == ("hold", ["reward"])
    assert look(labels(-0.15, 2000), RULES, approved={"arm sizes", "reward"})["decision"] == "roll back"


def test_a_user_counts_once_with_the_first_arm():
    rows = [
        LabelRow("a", "anchor", 0.25, 1.0),
        LabelRow("a", "candidate", 0.25, 9.0),
        LabelRow("b", "anchor", 0.25, 1.0),
    ]
    seen = look(rows, RULES)
    assert (seen["users"], seen["candidates"]) == (2, 0) and abs(seen["metrics"]["reward"]["effect"]) < 1


@pytest.mark.parametrize(
    ("candidate", "decision"),
    [
        (ServiceSample(1000, 9, 900, 2.0), "wait"),  # under one in a hundred
        (ServiceSample(1000, 40, 900, 2.0), "roll back"),
        (ServiceSample(2000, 2, 1000, 2.9), "wait"),
        (ServiceSample(2000, 2, 1000, 3.1), "roll back"),
        (ServiceSample(2000, 2, 999, 3.1), "wait"),  # the others are events and health
        (ServiceSample(0, 0, 0, 0.0), "wait"),
        (ServiceSample(3, 3, 0, 9.0), "wait"),  # too few to say anything
        (ServiceSample(8, 6, 2, 9.0), "roll back"),
    ],
)
def test_errors_and_latency_go_back_without_statistics(candidate, decision):
    seen = look([], RULES, service={"anchor": ServiceSample(5000, 10, 4000, 2.0), "candidate": candidate})
    assert seen["decision"] == decision


def test_an_anchor_that_answers_nothing_does_not_take_the_candidate_back():
    service = {"anchor": ServiceSample(4000, 4000, 0, 0.0), "candidate": ServiceSample(1500, 0, 1500, 3.0)}
    assert look([], RULES, service=service)["decision"] == "wait"


def test_servers_of_equal_latency_are_not_told_apart():
    """Answers of language models have long tails: ln t has a standard deviation of 1.3 here."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        p95 = [float(np.quantile(rng.lognormal(0, 1.3, LEAST_ANSWERED), 0.95)) for _ in range(2)]
        arms = zip(("anchor", "candidate"), p95, strict=True)
        service = {arm: ServiceSample(LEAST_ANSWERED, 0, LEAST_ANSWERED, one) for arm, one in arms}
        assert look([], RULES, service=service)["decision"] == "wait"


def test_a_step_does_not_end_before_every_metric_was_tested():
    rows = [row._replace(metric="follow_up") for row in labels(0, 400)]
    assert decide(look(rows, RULES), RULES, 100)[0] == "advance"
    kept = [row._replace(metric="keep") for row in rows if row.arm == "anchor"]
    seen = look([*rows, *kept], RULES)
    assert decide(seen, RULES, 100) == ("wait", "keep has 0 users of the candidate, of at least 50")


def test_a_name_that_is_no_text_has_an_arm():
    assert arm_of("salt", "\udcff", 0.5) in ("anchor", "candidate")


@pytest.mark.parametrize("line", ["", "[]", '{"user": "a"}', '{"user": "a", "arm": "b", "fraction": 0.1, "value": 1}'])
def test_a_line_that_is_no_label(tmp_path, line):
    good = json.dumps(LabelRow("a", "anchor", 0.1, 0.5)._asdict())
    (tmp_path / "rows.jsonl").write_text(f"{good}\n")
    assert read_rows(tmp_path / "rows.jsonl") == [LabelRow("a", "anchor", 0.1, 0.5)]
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(UserError, match="line 2 of .* is not a label"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def server():
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"weight_version": 7, "refused": "too large"}).encode())

        def log_message(self, format, *args):
            del format, args

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_every_server_must_answer_the_version(server):
    require_version([server], 7)
    with pytest.raises(UserError, match=r"serves version 7, not 8 \(too large\)"):
        require_version([server], 8)
    with pytest.raises(UserError, match="does not say which weights it serves"):
        require_version([server, "http://127.0.0.1:1"], 7)


def test_rules_out_of_range():
    with pytest.raises(UserError, match="alpha=0"):
        CanaryRules(alpha=0)
