import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess

import pytest

from composer_jax.errors import UserError
from composer_jax.observe import report
from composer_jax.observe.episodes import write_episodes
from composer_jax.observe.findings import Table, TableRow
from tests.observe.example_run import bug_episode, chain_episode

EVIL = "</script><img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "img", "source", "input", "br", "link"}


class Page(html.parser.HTMLParser):
    """A parsed page: its tags with their attributes and the text of each script; asserts that tags nest."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.tags, self.scripts, self._open = text, [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data

    def attributes(self, name):
        return [attrs[name] for _, attrs in self.tags if name in attrs]

    def episodes(self):
        (data,) = [s for (_, a), s in zip(self._script_tags(), self.scripts, strict=True) if a.get("type")]
        return json.loads(data)

    def _script_tags(self):
        return [(tag, attrs) for tag, attrs in self.tags if tag == "script"]


@pytest.fixture(scope="module")
def page(finished_run) -> Page:
    return Page(report.write_report(finished_run).read_text())


def test_the_page_needs_nothing_but_itself(page):
    assert not re.search(r"https?://", page.text)
    assert not re.search(r"(src|href|srcset)=[\"']?//", page.text)
    for name in ("src", "srcset"):
        assert all(value.startswith("data:image/png;base64,") for value in page.attributes(name))
    ids = set(page.attributes("id"))
    assert all(href.startswith("#") and href[1:] in ids for href in page.attributes("href"))
    assert "@import" not in page.text and "url(" not in page.text
    assert len(page.text) < 5_000_000


def test_only_the_viewers_script_may_run(page):
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a]
    viewer = page.scripts[-1]
    digest = base64.b64encode(hashlib.sha256(viewer.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_the_page_has_the_results(page):
    for words in ("0.0123 nats", "After RL: 1 of 4 suites worse", "24 min 07 s", "4f1c09ab", "+55.1 points"):
        assert words in page.text
    assert "Not in this run yet" not in page.text


def test_the_page_opens_with_verdicts_and_one_picture(page):
    opening = page.text[page.text.index("<h1>") : page.text.index("<nav")]
    verdicts = re.findall(r'<td class="outcome[^>]*>([^<]*)</td>', opening)
    assert verdicts == ["worse", "better", "better", "not shown to differ"]
    assert opening.index("unseen bugs") < opening.index(">bugs<") < opening.index("whole")
    assert opening.count("<img") == 1 and "<p>" not in opening


def test_pictures_lie_beside_the_page_in_both_schemes(page, finished_run):
    names = {file.name for file in (finished_run / "plots").iterdir()}
    curves = (
        "overview",
        "pass_at_1",
        "pretraining",
        "sft",
        "rl_reward",
        "summaries",
        "rl_health",
        "rl_staleness",
        "time_split",
    )
    assert names == {f"{name}{scheme}.png" for name in curves for scheme in ("", "_dark")}
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 8
    assert all(page.attributes("alt"))


def test_every_episode_is_in_the_page_with_its_stage(page):
    episodes = page.episodes()
    assert [e["stage"] for e in episodes] == ["before"] * 12 + ["after"] * 12 + ["rl"] * 8
    spliced = next(e for e in episodes if e["summaries"])
    assert [[m["kind"] for m in segment][:2] for segment in spliced["segments"]][1] == ["prompt", "carry"]


def test_traffic_has_a_section_if_there_is_some(tmp_path, page):
    table = Table("Signals", ("version 1",), "", [TableRow("keep", EVIL, ("0.61 (0.55 to 0.68)",), "")])
    shown = Page(report.write_report(tmp_path, [table]).read_text())
    section = shown.text[shown.text.index('<section id="traffic">') :]
    assert "0.61 (0.55 to 0.68)" in section and EVIL not in section
    assert "#traffic" in shown.attributes("href")
    assert "traffic" not in page.attributes("id")


def evil_workdir(workdir):
    record = chain_episode(9, 0, 1.0, None, 0).to_json()
    for name in ("task_id", "family", "outcome", "instruction", "split"):
        record[name] = EVIL
    record["parts"] = {EVIL: EVIL}
    for message in sum(record["segments"], ()):
        message["text"] = EVIL
        for call in message["calls"]:
            call.update(name=EVIL, arguments={EVIL: EVIL}, error=EVIL)
    write_episodes(workdir / "episodes" / "before.jsonl", [record])
    evil_results = {"config_hash": EVIL, "phases_s": {EVIL: 3.0}}
    (workdir / "results.json").write_text(json.dumps(evil_results))
    (workdir / "config.json").write_text(json.dumps({"config": {EVIL: EVIL}}))
    return workdir


def test_episode_text_is_escaped(tmp_path):
    text = report.write_report(evil_workdir(tmp_path)).read_text()
    page = Page(text)
    assert "<img" not in text and len(page.scripts) == 2
    assert page.episodes()[0]["instruction"] == EVIL


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
def test_a_browser_shows_the_episode_and_runs_nothing_of_it(tmp_path):
    path = report.write_report(evil_workdir(tmp_path))
    quiet = [
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-sync",
        "--no-first-run",
        "--no-sandbox",
    ]
    command = [CHROMIUM, "--headless", *quiet, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    shown = subprocess.run([*command, path.as_uri()], capture_output=True, timeout=60, check=True).stdout.decode()
    assert "broken into</title>" not in shown and "<img" not in shown
    assert "Summary splice" in shown and "Segment 3 of 3" in shown
    assert shown.count("&lt;img src=x onerror=") > 10


def test_the_page_of_an_empty_workdir_lists_what_is_missing(tmp_path):
    page = Page(report.write_report(tmp_path).read_text())
    assert "This run has no results yet" in page.text
    for words in report.MISSING.values():
        assert words in page.text
    assert page.scripts == [] and not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("left", "title"),
    [
        ("metrics/pretrain.jsonl", "Held-out loss went from"),
        ("metrics/rl.jsonl", "This run has no results yet"),
        ("episodes/before.jsonl", "This run has no results yet"),
        ("results.json", "After RL: 1 of 4 suites worse"),
    ],
)
def test_one_part_alone_is_reported(finished_run, tmp_path, left, title):
    (tmp_path / left).parent.mkdir(exist_ok=True)
    shutil.copy(finished_run / left, tmp_path / left)
    page = Page(report.write_report(tmp_path).read_text())
    assert title in page.text and "Not in this run yet" in page.text


def test_stages_that_the_config_leaves_out_are_not_missing(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    for name in ("metrics/pretrain.jsonl", "metrics/rl.jsonl", "episodes/after.jsonl", "episodes/rl.jsonl"):
        (tmp_path / "run" / name).unlink()
    config = json.loads((tmp_path / "run/config.json").read_bytes())
    for stages, missing in ((["sft"], []), (["pretrain", "sft"], ["pretraining curves"])):
        config["config"]["stages"] = stages
        (tmp_path / "run/config.json").write_text(json.dumps(config))
        text = Page(report.write_report(tmp_path / "run").read_text()).text
        assert ("Not in this run yet" in text) == bool(missing) and all(name in text for name in missing)


def test_too_many_episodes_are_left_out_evenly_and_counted(tmp_path, monkeypatch):
    for stage in ("before", "after"):
        write_episodes(tmp_path / "episodes" / f"{stage}.jsonl", [bug_episode(n, 0, 1.0, None, 0) for n in range(20)])
    monkeypatch.setattr(report, "EPISODE_BYTES", 25_000)
    page = Page(report.write_report(tmp_path).read_text())
    stages = [e["stage"] for e in page.episodes()]
    assert 0 <= stages.count("before") - stages.count("after") <= 1
    assert f"{40 - len(stages)} more episodes were left out" in page.text and len(stages) > 4


def test_the_same_run_gives_the_same_page(tmp_path, finished_run):
    for name in ("results.json", "config.json"):
        shutil.copy(finished_run / name, tmp_path / name)
    first = report.write_report(tmp_path).read_bytes()
    assert report.write_report(tmp_path).read_bytes() == first


def test_wrong_input_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no folder .*absent to report on; run a stage"):
        report.write_report(tmp_path / "absent")
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(UserError, match="results.json is not JSON"):
        report.write_report(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(UserError, match="results.json holds no JSON object"):
        report.write_report(tmp_path)


def test_phases_of_pretraining_are_one_curve(tmp_path):
    """Tokens count on over phases, in the order of config.stages; a phase that the run skips is not read."""
    config = {"stages": ["pretrain", "long", "sft"], "phases": {"long": {}, "skipped": {}}}
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    (tmp_path / "metrics").mkdir()
    rows = [{"step": 0, "tokens": 0, "heldout_nll": 3.0}, {"step": 1, "tokens": 100, "loss": 2.0}]
    for stage in ("pretrain", "long", "skipped"):
        (tmp_path / "metrics" / f"{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    joined = report.RunFiles.read(tmp_path).metrics["pretrain"]
    assert [(row["stage"], row["tokens"]) for row in joined] == [
        ("pretrain", 0),
        ("pretrain", 100),
        ("long", 100),
        ("long", 200),
    ]
