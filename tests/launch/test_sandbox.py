"""`python -m launch.sandbox`, as a person starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(*arguments: str, stdin: str = "", cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "launch.sandbox", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SECRET": "of-the-host"},
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of somebody's."""
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.txt").write_text("a\n")
    (root / "run.sh").write_text("echo run\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("src/a.txt")
    return root


def state(folder: Path) -> dict[str, tuple]:
    """Everything in it, with modes and times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder).as_posix()] = (status.st_mode, status.st_mtime_ns, content)
    return found


def test_output_code_and_stdin_are_the_commands_and_the_folder_stays(folder):
    before = state(folder)
    script = "cat; ./run.sh; echo err >&2; rm -r src; echo new > new; echo x > run.sh; exit 3"
    done = launch(f"--workspace={folder}", "--", "sh", "-c", script, stdin="given\n")
    assert (done.stdout, done.stderr, done.returncode) == ("given\nrun\n", "err\n", 3)
    assert state(folder) == before


def test_write_back_writes_everything_that_changed_and_nothing_else(folder):
    before = state(folder)
    script = "mkdir -p new/empty; echo n > new/n; chmod 750 new/n; ln -s n new/l; rm link; ln -s ../x link; rm run.sh"
    done = launch(f"--workspace={folder}", "--write-back", "--", "sh", "-c", f"{script}; exit 4")
    assert done.returncode == 4, done
    after = state(folder)
    assert set(after) == {"link", "new", "new/empty", "new/l", "new/n", "src", "src/a.txt"}
    assert after["new/n"][0] & 0o777 == 0o750 and after["new/n"][2] == b"n\n"
    assert after["new/l"][2] == "n" and after["link"][2] == "../x"
    assert after["src/a.txt"] == before["src/a.txt"]


def test_it_writes_nothing_through_links_that_lead_out(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    script = f"rm -r src; ln -s {outside} src; echo gotcha > src/file; true"
    launch(f"--workspace={folder}", "--write-back", "--", "sh", "-c", script)
    assert list(outside.iterdir()) == []
    assert os.readlink(folder / "src") == str(outside)


@pytest.mark.parametrize(
    ("flags", "command", "code", "says"),
    [
        (["--timeout=0.5"], ["sleep", "60"], 124, "out of time (--timeout)"),
        (["--memory=100"], ["python", "-c", "x = bytearray(10**9)"], 137, "out of memory (--memory)"),
        ([], ["no-such-program"], 127, "no-such-program"),
        (["--workspace=/does/not/exist"], ["true"], 125, "/does/not/exist is not a folder"),
        (["--backend=unknown"], ["true"], 125, "'unknown' is unknown"),
        ([], [], 2, "a command is missing"),
        (["--timeout=-1"], ["true"], 2, "timeout"),
    ],
)
def test_exit_codes_and_what_is_said(folder, flags, command, code, says):
    done = launch(f"--workspace={folder}", *flags, "--", *command)
    assert done.returncode == code, done
    assert says in done.stderr and "Traceback" not in done.stderr.replace("Traceback (most recent call last)", "", 1)


def test_it_sees_nothing_of_the_host_and_no_network(folder):
    code = (
        "import os, socket; print(sorted(os.environ.values()), os.path.exists('/etc/passwd'), os.listdir('/tmp'))\n"
        "try: socket.create_connection(('127.0.0.1', 1))\n"
        "except OSError as error: print(error.errno)\n"
        "print(open('/proc/net/dev').read() if os.path.exists('/proc/net/dev') else 'no devices')"
    )
    done = launch(f"--workspace={folder}", "--", "python", "-c", code)
    assert "of-the-host" not in done.stdout and "False []" in done.stdout
    with_network = launch(f"--workspace={folder}", "--network", "--", "cat", "/etc/resolv.conf")
    if Path("/etc/resolv.conf").exists():
        assert with_network.stdout == Path("/etc/resolv.conf").read_text()
    assert launch(f"--workspace={folder}", "--", "cat", "/etc/resolv.conf").returncode == 1


def test_packages_are_importable(folder, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "thepackage.py").write_text("NAME = 'it'\n")
    command = ["python", "-c", "import thepackage; print(thepackage.NAME)"]
    done = launch(f"--workspace={folder}", f"--packages={tmp_path / 'site'}", "--", *command)
    assert done.stdout == "it\n", done


def test_flags_of_the_command_are_its_own(folder):
    assert launch(f"--workspace={folder}", "--", "ls", "--help").stdout.startswith("Usage: ls")
    assert "--write-back" in launch("--help").stdout


def test_write_back_leaves_modes_and_follows_the_name_of_the_folder(folder, tmp_path):
    (folder / "private").write_text("p\n")
    (folder / "private").chmod(0o600)
    folder.chmod(0o770)
    (tmp_path / "alias").symlink_to(folder)
    script = "echo more >> private; echo a >> src/a.txt; chmod 600 run.sh"
    done = launch(f"--workspace={tmp_path / 'alias'}", "--write-back", "--", "sh", "-c", script)
    assert done.returncode == 0, done
    assert (folder / "private").read_text() == "p\nmore\n"
    modes = {path: os.stat(folder / path).st_mode & 0o7777 for path in (".", "private", "src/a.txt", "run.sh")}
    assert modes == {".": 0o770, "private": 0o600, "src/a.txt": 0o644, "run.sh": 0o600}


def test_what_the_command_said_is_shown_even_if_writing_back_fails(folder):
    script = "echo important; for i in 1 2 3 4; do truncate -s 1M sparse$i; done; exit 7"
    done = launch(f"--workspace={folder}", "--disk=2", "--write-back", "--", "sh", "-c", script)
    assert (done.stdout, done.returncode) == ("important\n", 125), done
    assert "more than 2097152 bytes" in done.stderr
