"""Harbor and Terminal-Bench directories of other projects, from manifest to reward."""

import asyncio
import dataclasses
import json

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change
from composer_jax.tasks import ScriptGrader, Task
from composer_jax.tasks.formats import ReadOptions, read_tasks
from composer_jax.tasks.grading import grade
from composer_jax.tasks.harbor import write_task
from composer_jax.tasks.validate import validate
from tests.demo.generate import generate

TOML = """
schema_version = "1.1"
artifacts = ["/app/out.txt"]
[task]
name = "acme/sum-up"
authors = [{ name = "A", email = "a@b" }]
[metadata]
difficulty = "easy"
tags = ["files"]
created = 2024-01-01
[verifier]
timeout_sec = 20.0
env = { WANTED = "6" }
[agent]
timeout_sec = 900.0
[environment]
cpus = 2
memory_mb = 4096
allow_internet = false
"""
DOCKERFILE = """\
# What every task of Terminal-Bench begins with.
FROM python:3.13-slim-bookworm
ENV PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
RUN mkdir -p out
COPY numbers.txt \\
     tools/ \\
     /app/
"""
TEST_SH = """\
mkdir -p /logs/verifier
if [ "$(cat /app/out/sum.txt)" = "$WANTED" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
def make(tmp_path):
    """Writes a task directory with the given files replaced (None: left out), and returns its path."""

    def make(files=(), name="sum-up"):
        contents = {
            "task.toml": TOML,
            "instruction.md": "Sum up numbers.txt into out/sum.txt.\n",
            "environment/Dockerfile": DOCKERFILE,
            "environment/numbers.txt": "1\n2\n3\n",
            "environment/tools/add.sh": "echo $(($1 + $2))\n",
            "solution/solve.sh": "echo 6 > /app/out/sum.txt\n",
            "tests/test.sh": TEST_SH,
            **dict(files),
        }
        for path, text in contents.items():
            if text is not None:
                target = tmp_path / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
        return tmp_path / name

    return make


@pytest.fixture
def options(tmp_path):
    return ReadOptions(store=tmp_path / "store")


def read_one(path, options):
    (task,) = read_tasks(path, options)
    return task


def test_a_plain_task_needs_no_container(make, options):
    path = make()
    task = read_one(path, options)
    assert (task.id, task.family, task.split, task.image, task.network) == (
        "acme/sum-up",
        "harbor",
        "heldout",
        None,
        False,
    )
    assert task.instruction == "Sum up numbers.txt into out/sum.txt.\n"
    assert task.grader == ScriptGrader(path / "tests", 20.0, {"WANTED": "6"})
    names = {child.relative_to(task.repository).as_posix() for child in task.repository.rglob("*")}
    # What a folder holds is copied, not the folder; neither Dockerfile nor tests nor solution are there.
    assert names == {"numbers.txt", "add.sh", "out"}
    assert task.metadata["resources"] == {"cpus": 2.0, "memory_mb": 4096.0}
    assert task.metadata["described"] == {"difficulty": "easy", "tags": ["files"], "created": "2024-01-01"}
    assert task.metadata["solution"] == str(path / "solution")
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_a_task_is_solved_and_graded_in_real_sandboxes(make, options, pool):
    task = read_one(make(), options)

    async def play(command):
        """What an agent's command leaves, graded."""
        async with await pool.acquire({}, pool.tree(task.repository)) as sandbox:
            await sandbox.run(["bash", "-c", command])
            changes = await sandbox.changes()
        return await grade(task, changes, pool)

    async def rewards():
        solution = (make() / "solution/solve.sh").read_text()
        forgery = "mkdir -p logs/verifier tests; echo 1 > logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.txt"
        return [(await play(command)).reward for command in (solution, "true", "echo 7 > out/sum.txt", forgery)]

    assert asyncio.run(rewards()) == [1.0, 0.0, 0.0, 0.0]


def test_a_folder_of_tasks_is_read_in_order_ours_among_them(make, options, tmp_path):
    folder = tmp_path / "all"
    make(name="all/b")
    make({"task.toml": TOML.replace("acme/sum-up", "acme/other")}, name="all/a")
    write_task(generate("bugfix", "train", 0, 0), folder / "c")
    (folder / ".cache").mkdir()
    (folder / "README.md").write_text("not a task")
    tasks = read_tasks(folder, options)
    assert [task.id for task in tasks] == ["acme/other", "acme/sum-up", generate("bugfix", "train", 0, 0).id]
    assert tasks[2] == generate("bugfix", "train", 0, 0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("RUN apt-get update && apt-get install -y gcc", "only mkdir and pip install of pinned packages"),
        ("RUN pip install numpy", "numpy is not a package at a stated version"),
        ("RUN pip install numpy==2.0", "numpy==2.0 is not installed: no folder of packages was given"),
        ("COPY numbers.txt /etc/numbers.txt", "/etc/numbers.txt is not below /workspace, /app, /testbed"),
        ("COPY --from=other /a /app/a", "only COPY with sources and a destination"),
        ("COPY --chown=user numbers.txt /app/", "only COPY with sources and a destination"),
        ("COPY ../secret /app/", "a source is not a plain path in the folder"),
        ("COPY numbers.txt /app/../etc/", "is not below"),
        ("COPY numbers.txt /workspace/", "it uses /workspace as well as /app"),
        ("ADD https://example.com/x.tar /app/", "it downloads or unpacks"),
        ("FROM node:20", "only one stage based on Python, Debian or Ubuntu"),
        ("ENV API_URL=http://localhost", "the variable API_URL may matter"),
        ("USER agent", "only an image can do this"),
        ('CMD ["python", "server.py"]', "it starts something"),
        ("WORKDIR /srv", "/srv is not below"),
        ("RUN mkdir -p /app/$(whoami)", "only mkdir and pip install"),
        ("COPY 'numbers.txt /app/", "its words cannot be parsed"),
    ],
)
def test_a_line_that_needs_a_container_is_named(make, options, line, why):
    path = make({"environment/Dockerfile": DOCKERFILE + line + "\n"})
    task = read_one(path, options)
    assert task.repository is None and task.packages is None
    assert task.image.startswith("composer-jax/sum-up:")
    assert task.metadata["build"] == str(path / "environment")
    reason = task.metadata["needs_image"]
    assert f"environment/Dockerfile, line 9: {line}" in reason and why in reason


def test_lines_without_effect_in_a_sandbox_need_no_image(make, options):
    more = 'LABEL a="b"\nEXPOSE 80\nCMD ["sleep", "infinity"]\nENTRYPOINT /bin/bash\nRUN mkdir -p /app/deep/er\n'
    task = read_one(make({"environment/Dockerfile": DOCKERFILE + more}), options)
    assert task.image is None and (task.repository / "deep/er").is_dir()
    whole = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY . .\n"
    ignore = "Dockerfile\n*.sh\n.dockerignore\n"
    task = read_one(make({"environment/Dockerfile": whole, "environment/.dockerignore": ignore}), options)
    assert (task.repository / "numbers.txt").is_file() and not (task.repository / "Dockerfile").exists()


def test_installed_pinned_packages_need_no_image(make, options, packages, tmp_path):
    (info := packages / "Some_Package-1.2.dist-info").mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Some_Package\nVersion: 1.2\n")
    options = dataclasses.replace(options, packages=packages)
    line = "RUN pip install --no-cache-dir some-package=={}\n"
    task = read_one(make({"environment/Dockerfile": DOCKERFILE + line.format("1.2")}), options)
    assert task.image is None and task.packages == packages
    task = read_one(make({"environment/Dockerfile": DOCKERFILE + line.format("1.3")}), options)
    assert "some-package==1.3 is not in" in task.metadata["needs_image"]


def test_an_image_may_be_named_or_is_rebuilt_when_its_folder_changes(make, options):
    named = TOML.replace("cpus = 2", 'cpus = 2\ndocker_image = "acme/sum:1"')
    task = read_one(make({"task.toml": named, "environment/Dockerfile": None}, name="named"), options)
    assert task.image == "acme/sum:1" and "build" not in task.metadata
    assert "names the image acme/sum:1" in task.metadata["needs_image"]
    lines = {"environment/Dockerfile": DOCKERFILE + "USER me\n"}
    first = read_one(make(lines), options).image
    assert read_one(make(lines), options).image == first
    assert read_one(make({**lines, "environment/numbers.txt": "4"}), options).image != first


def test_variables_of_the_environment_need_a_container(make, options, monkeypatch):
    monkeypatch.setenv("COMPOSER_TEST_HERE", "here")
    toml = TOML + "[environment.env]\nA = '${COMPOSER_TEST_HERE}'\nB = '${COMPOSER_TEST_NOT:-default}'\n"
    task = read_one(make({"task.toml": toml}), options)
    assert task.metadata["environment"] == {"A": "here", "B": "default"}
    assert "sets A, B in its [environment.env]" in task.metadata["needs_image"]
    with pytest.raises(UserError, match="needs the environment variable COMPOSER_TEST_NOT; set it"):
        read_tasks(make({"task.toml": toml.replace(":-default", "")}), options)


def test_variables_of_the_solution_are_expanded_where_it_runs(make, options, monkeypatch, pool):
    monkeypatch.delenv("COMPOSER_TEST_KEY", raising=False)
    path = make({"task.toml": TOML + "[solution.env]\nSUM = '${COMPOSER_TEST_KEY}'\n"})
    (path / "solution/solve.sh").write_text("echo $SUM > /app/out/sum.txt\n")
    task = read_one(path, options)
    assert task.metadata["solution_environment"] == {"SUM": "${COMPOSER_TEST_KEY}"}
    (validation,) = asyncio.run(validate([task], pool, runs=1))
    assert validation.verdict == "unknown"
    assert validation.detail == (
        f"{path}/task.toml [solution] [env] needs the environment variable COMPOSER_TEST_KEY; set it"
    )
    monkeypatch.setenv("COMPOSER_TEST_KEY", "6")
    assert asyncio.run(validate([task], pool, runs=1))[0].verdict == "valid"


@pytest.mark.parametrize(
    ("old", "new", "network"),
    [
        ("allow_internet = false", "", True),
        ("allow_internet = false", 'network_mode = "no-network"', False),
        ("allow_internet = false", 'allow_internet = false\nnetwork_mode = "public"', True),
        ("[agent]", '[agent]\nnetwork_mode = "public"', True),
        ("[verifier]", '[verifier]\nnetwork_mode = "no-network"', False),
    ],
)
def test_the_network_is_as_the_task_says(make, options, old, new, network):
    assert read_one(make({"task.toml": TOML.replace(old, new)}), options).network is network


def test_older_manifests_are_read(make, options):
    toml = 'version = "1.0"\n[metadata]\ndifficulty = "hard"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'
    task = read_one(make({"task.toml": toml}), options)
    assert task.id == "sum-up" and task.network
    assert task.metadata["resources"] == {"cpus": 1.0, "memory_mb": 2048.0}
    assert task.grader.timeout_s == 600.0


CHANGED = [
    ("cpus = 2", "gpus = 1", r"GPUs \(\[environment\] gpus = 1\)"),
    ("cpus = 2", "tpu = { type = 'v5e' }", r"a TPU \(\[environment\] tpu = {'type': 'v5e'}\)"),
    ("cpus = 2", "os = 'windows'", r"another operating system \(\[environment\] os = 'windows'\)"),
    ("cpus = 2", "skills_dir = '/skills'", r"skills \(\[environment\] skills_dir = '/skills'\)"),
    (
        "cpus = 2",
        "allowed_hosts = ['a.org']",
        r"restricted to some hosts \(\[environment\] allowed_hosts = \['a.org'\]\)",
    ),
    (
        "[verifier]",
        "[verifier]\njudge = 'model-x'",
        r"something unknown \(\[verifier\] judge = 'model-x'\).*run it with",
    ),
    ("cpus = 2", "mcp_servers = 'linux'", r"MCP servers \(\[environment\] mcp_servers = 'linux'\)"),
    ("cpus = 2", "privileged = true", r"something unknown \(\[environment\] privileged = True\)"),
    ("[agent]", "[agent]\nallowed_hosts = ['a']", r"to some hosts \(\[agent\] allowed_hosts = \['a'\]\)"),
    *(
        ("cpus = 2", f"workdir = '{path}'", "it must be an absolute path below /")
        for path in ("sub", "/", "//", "/a/..")
    ),
    ("[verifier]", "[verifier]\nuser = 'me'", r"another user \(\[verifier\] user = 'me'\)"),
    ("cpus = 2", "cpus = 'two'", "cpus = 'two'; it must be a number"),
    ("cpus = 2", "cpus = -1", "cpus = -1; it must be a number from 0 to 1e15"),
    ("memory_mb = 4096", "memory = 'much'", "memory = 'much'; write memory_mb"),
    ("[agent]", "[agent]\nuser = 'me'", "another user"),
    ("[agent]", "[agent]\nnetwork_mode = 'allowlist'", "a network restricted to some hosts"),
    ("[agent]", "[agent]\nnetwork_mode = 'half'", "network_mode = 'half'; it is one of public, no-network"),
    ("[verifier]", "[verifier]\nnetwork_mode = 'public'", "verifier's own .*'public', not 'no-network'.*run it with"),
    ("[verifier]", "[verifier]\nenvironment_mode = 'separate'", "a verifier in an environment of its own"),
    ('"1.1"', '"2.0"', "of schema '2.0'; supported are 1.0"),
    ("[task]", "[task", "is not TOML"),
    ("[task]\n", "task = 3\n[other]\n", "has task = 3; it must be a table"),
]
ADDED = {
    "[[steps]]\nname = 'one'\n": r"several steps \(\[\[steps\]\]\)",
    "[environment.healthcheck]\ncommand = 'true'\n": r"a health check \(\[environment\] healthcheck = {'command",
    "[verifier.environment]\ncpus = 4\n": r"a verifier in an .* \(\[verifier\] environment = {'cpus': 4}\)",
    "[[verifier.collect]]\ncommand = 'true'\n": "commands that collect what is verified",
    "[[environment.mcp_servers]]\nname = 'x'\n": r"MCP servers \(\[environment\] mcp_servers = \[{'name': 'x'}\]\)",
}
FILES = [
    ("instruction.md", None, "instruction.md cannot be read: No such file"),
    ("tests/test.sh", None, "test.sh cannot be read: No such file"),
    ("environment/Dockerfile", None, "neither an environment/Dockerfile nor a docker_image; add one"),
    ("environment/numbers.txt", None, "has no 'numbers.txt', which its Dockerfile copies"),
    ("environment/docker-compose.yaml", "services: {}\n", r"several containers \(environment/docker-compose.yaml\)"),
    ("environment/Dockerfile", "# nothing\n", "Dockerfile is empty"),
    ("environment/Dockerfile", "<<<<\n", "line 1 is not an instruction of a Dockerfile: '<<<<'"),
]


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        *(("task.toml", TOML.replace(old, new, 1), sentence) for old, new, sentence in CHANGED),
        *(("task.toml", TOML + more, f"asks for {what}.*run it with Harbor") for more, what in ADDED.items()),
        *FILES,
    ],
)
def test_what_cannot_be_run_here_is_refused_by_name(make, options, file, text, sentence):
    with pytest.raises(UserError, match=sentence):
        read_tasks(make({file: text}), options)


def test_fields_that_ask_for_nothing_are_not_refused(make, options):
    more = "storage_mb = 10240\nbuild_timeout_sec = 600.0\nos = 'linux'\nmcp_servers = []\nskills_dir = ''\n"
    more += "privileged = false\nretries = 0\nallowed_hosts = []\n"
    more += "workdir = '/app'"
    task = read_one(make({"task.toml": TOML.replace("cpus = 2", more)}), options)
    assert task.image is None and task.metadata["workdir"] == "/app"
    elsewhere = read_one(make({"task.toml": TOML.replace("cpus = 2", "workdir = '/srv'")}), options)
    assert "sets [environment] workdir = '/srv'" in elsewhere.metadata["needs_image"]


def test_a_script_that_installs_something_needs_the_image(make, options):
    script = "set -e\n# apt-get is not needed\napt-get update && apt-get install -y curl\n"
    task = read_one(make({"tests/test.sh": script}), options)
    assert "tests/test.sh, line 3: apt-get update" in task.metadata["needs_image"] and task.image
    task = read_one(make({"tests/test.sh": "python -c 'import pip' # uv run\n"}), options)
    assert task.image is None


def test_links_out_of_a_task_are_not_followed(make, options, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("mine")
    path = make()
    (path / "environment/away").symlink_to(tmp_path / "secret")
    (path / "environment/d").mkdir()
    (path / "environment/d/away").symlink_to("../../../secret")
    for lines, why in {
        "COPY away/key /app/key\n": "a source is behind a link",
        "COPY away /app/away\nCOPY numbers.txt /app/away/\n": "the link away leads out of the workspace",
        "COPY d /app/\nCOPY numbers.txt /app/away/\n": "the link away leads out of the workspace",
    }.items():
        (path / "environment/Dockerfile").write_text(DOCKERFILE + lines)
        assert why in read_one(path, options).metadata["needs_image"]
    assert [child.name for child in (tmp_path / "secret").iterdir()] == ["key"]
    (path / "instruction.md").unlink()
    (path / "instruction.md").symlink_to(tmp_path / "secret/key")
    with pytest.raises(UserError, match="instruction.md is a link; put the file itself there"):
        read_tasks(path, options)


def test_a_deleted_folder_and_a_broken_change_are_graded_too(make, options, pool):
    task = read_one(make({"tests/test.sh": "[ -e /app/out ]; echo $? > /logs/verifier/reward.txt\n"}), options)

    async def both():
        gone = await grade(task, {"out": GONE}, pool)
        outside = await grade(task, {"../out": Change("file", b"x")}, pool)
        return gone, outside

    gone, outside = asyncio.run(both())
    assert gone.reward == 1.0
    assert outside.reward == 0.0 and outside.detail.startswith("the changes cannot be made")
