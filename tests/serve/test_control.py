"""What a trainer does with a server: pausing, new weights, aborting, and reading what sessions saw."""

import threading
import time

import httpx2 as httpx
import pytest

from composer_jax.sampler.policy import Sample
from composer_jax.serve.session_records import SessionRecords
from tests.serve.conftest import CONTROL_KEY

KEY = {"authorization": f"Bearer {CONTROL_KEY}"}
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "seed": 1, "return_token_ids": True}


def ask(url, **changes):
    return httpx.post(f"{url}/v1/chat/completions", json=ASK | changes, timeout=60)


def control(url, path, method="POST", **options):
    return httpx.request(method, f"{url}{path}", headers=KEY, timeout=60, **options)


class Asking(threading.Thread):
    """A request in a thread."""

    def __init__(self, url, **changes):
        super().__init__()
        self.run_request = lambda: ask(url, **changes)
        self.answer = None
        self.start()

    def run(self):
        self.answer = self.run_request()

    def result(self):
        self.join(60)
        return self.answer


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_pause_holds_requests_until_it_ends(network_url):
    expected = ask(network_url).json()["choices"][0]
    assert control(network_url, "/pause?mode=keep").json() == {"status": "paused", "mode": "keep"}
    asking = Asking(network_url)
    wait_until(lambda: httpx.get(f"{network_url}/stats").json()["waiting"] == 1)
    assert asking.is_alive()
    control(network_url, "/resume")
    assert asking.result().json()["choices"][0]["token_ids"] == expected["token_ids"]


def test_a_pause_that_aborts_answers_every_request(network_url):
    control(network_url, "/pause?mode=keep")
    asking = [Asking(network_url) for _ in range(3)]
    wait_until(lambda: httpx.get(f"{network_url}/stats").json()["waiting"] == 3)
    control(network_url, "/pause?mode=abort")
    assert {one.result().json()["choices"][0]["finish_reason"] for one in asking} == {"abort"}
    control(network_url, "/resume")
    assert ask(network_url).status_code == 200


def test_aborted_requests_end_and_others_go_on(network_url):
    control(network_url, "/pause?mode=keep")
    asking = Asking(network_url)
    wait_until(lambda: httpx.get(f"{network_url}/stats").json()["waiting"] == 1)
    assert control(network_url, "/abort_requests").json() == {"aborted": 1}
    control(network_url, "/resume")
    assert asking.result().status_code == 503
    assert ask(network_url).status_code == 200


@pytest.mark.parametrize("mode", ["keep", "recompute", "drain"])
def test_new_weights_carry_their_version(network_url, mode):
    before = httpx.get(f"{network_url}/health").json()["weight_version"]
    updated = control(network_url, "/update_weights", json={"checkpoint": "hf:here", "mode": mode})
    assert updated.json()["status"] == "updated" and updated.json()["weight_version"] == before + 1
    assert httpx.get(f"{network_url}/health").json() == updated.json() | {"status": "ok"}
    assert set(ask(network_url).json()["choices"][0]["weight_versions"]) == {before + 1}
    late = control(network_url, "/update_weights", json={"checkpoint": "hf:here", "version": before})
    assert late.status_code == 400 and f"version={before} is not above" in late.json()["error"]["message"]


def test_weights_with_other_checksums_than_the_trainers_are_refused(network_url):
    update = {"checkpoint": "hf:here", "mode": "recompute"}
    held = control(network_url, "/update_weights", json=update).json()
    version, checksums = held["weight_version"], held["weight_checksums"]
    assert len(checksums) == 3 and checksums[0].keys() == {"name", "dtype", "shape", "checksum"}
    wrong = [checksums[0] | {"checksum": "0" * 16}, *checksums[1:]]
    refused = control(network_url, "/update_weights", json=update | {"checksums": wrong})
    sentence = refused.json()["error"]["message"]
    assert refused.status_code == 409 and f"weights of version {version + 1} did not arrive" in sentence
    assert checksums[0]["checksum"] in sentence and f"The server goes on with version {version}." in sentence
    assert f"it has the bits of version {version}" in sentence
    assert set(ask(network_url).json()["choices"][0]["weight_versions"]) == {version}
    other = [one | {"dtype": "bfloat16"} for one in checksums]
    refused = control(network_url, "/update_weights", json=update | {"checksums": other})
    assert refused.status_code == 409 and "sampler.param_dtype (of a server: --dtype)" in refused.text
    assert control(network_url, "/update_weights", json=update | {"checksums": checksums}).status_code == 200
    assert control(network_url, "/update_weights", json=update | {"checksums": [{"name": 1}]}).status_code == 400


def test_a_session_keeps_what_was_really_sampled(network_url):
    session = {"X-Session-ID": "run-1/task 3"}
    answers = [
        httpx.post(f"{network_url}/v1/chat/completions", json=ASK | {"seed": seed}, headers=session, timeout=60).json()
        for seed in (1, 2)
    ]
    assert "run-1/task 3" in control(network_url, "/sessions", "GET").json()["sessions"]
    turns = control(network_url, "/sessions/run-1/task 3", "GET").json()["turns"]
    assert [turn["token_ids"] for turn in turns] == [answer["choices"][0]["token_ids"] for answer in answers]
    assert [turn["prompt_token_ids"] for turn in turns] == [answer["prompt_token_ids"] for answer in answers]
    assert all(len(turn["logprobs"]) == len(turn["weight_versions"]) == 20 for turn in turns)
    assert control(network_url, "/sessions/run-1/task 3", "DELETE").json()["deleted"]
    assert control(network_url, "/sessions/run-1/task 3", "GET").status_code == 404


def test_a_resumption_ends_a_pause_that_still_waits(network_url):
    asking = Asking(network_url, max_tokens=400, stop=None)
    pausing = threading.Thread(target=lambda: control(network_url, "/pause?mode=wait"))
    pausing.start()
    control(network_url, "/resume")
    pausing.join(60)
    control(network_url, "/resume")
    assert not pausing.is_alive() and asking.result().status_code == 200


def test_weights_cannot_wait_for_requests_that_are_paused(network_url):
    control(network_url, "/pause?mode=keep")
    refused = control(network_url, "/update_weights", json={"checkpoint": "hf:here", "mode": "drain"})
    control(network_url, "/resume")
    assert refused.status_code == 409


def test_a_session_belongs_to_the_key_that_began_it(scripted, text):
    with scripted(lambda context: [text.end_tokens[0]], api_keys=("a", "b"), control_key="c") as (url, _):
        ask_as = lambda key: httpx.post(  # noqa: E731
            f"{url}/v1/chat/completions", json=ASK, headers={"authorization": f"Bearer {key}", "X-Session-ID": "s"}
        )
        assert [ask_as(key).status_code for key in "aab"] == [200, 200, 403]
        assert len(httpx.get(f"{url}/sessions/s", headers={"authorization": "Bearer c"}).json()["turns"]) == 2


def test_what_is_oldest_is_forgotten_first():
    sample = Sample([1, 2], [0.0, 0.0], [0, 0], "stop")
    records = SessionRecords(most_sessions=2, most_tokens=12)
    for session, prompt in (("a", [1]), ("b", [2, 2]), ("a", [3]), ("c", [4])):
        records.add(session, "", prompt, sample)
    assert records.ids() == ["a", "c"] and len(records.get("a")) == 2
    records.add("c", "", [5] * 3, sample)
    assert [turn["prompt_token_ids"] for turn in records.get("a")] == [[3]]
    records.add("c", "", [6] * 9, sample)
    assert records.ids() == ["c"] and [len(turn["prompt_token_ids"]) for turn in records.get("c")] == [9]


def test_the_control_plane_has_a_key_of_its_own(network_url, scripted):
    for path in ("/pause", "/resume", "/update_weights", "/abort_requests"):
        assert httpx.post(f"{network_url}{path}").status_code == 401
    with scripted(lambda context: [], api_keys=("client",)) as (url, _):
        answer = httpx.post(f"{url}/pause", headers={"authorization": "Bearer client"})
        assert answer.status_code == 403 and "--control_key" in answer.json()["error"]["message"]
    assert control(network_url, "/pause?mode=never").status_code == 400
