"""What the trainer has in its environment and in its memory."""

import os

import pytest

SECRET = "secret-of-the-environment"
SEVEN = {"PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "PWD"}

LOOKS = {
    "its_own": "dict(os.environ)",
    "of_a_child": "subprocess.run(['env', '-0'], capture_output=True).stdout",
    "of_a_shell": "subprocess.run(['sh', '-c', 'set'], capture_output=True).stdout",
    "of_the_kernels_record": "open('/proc/self/environ').read()",
    "of_the_c_library": "[ctypes.string_at(p) for p in iter(lambda i=iter(range(999)): "
    "ctypes.c_void_p.from_address(ctypes.c_void_p.in_dll(libc, 'environ').value + 8 * next(i)).value, None)]",
    "of_command_lines": "[open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]",
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_the_environment(host, attempt, look):
    output = attempt(look)
    assert os.environ["COMPOSER_TEST_SECRET"] == SECRET
    assert output.startswith("DID ") and len(output) > 50, output
    assert SECRET not in output and "COMPOSER_TEST" not in output and "PYTEST" not in output
    assert os.environ.get("HOME", SECRET) not in output.replace("/root/.", "")


def test_only_the_documented_variables(attempt):
    assert set(eval(attempt("sorted(os.environ)").removeprefix("DID "))) <= SEVEN


def test_the_environment_of_the_worker(attempt):
    assert attempt("open('/proc/1/environ').read()") == "EACCES"


def test_the_memory_that_a_python_command_was_forked_with(host, attempt):
    """`python ...` is a fork of the worker: nothing of the trainer may be in what it inherits."""
    body = """
    halves = {"secret": (b"secret-of-", b"the-environment"), "own": (b"HASHSEED", b"=0")}
    found = set()
    with open("/proc/self/mem", "rb", 0) as memory:
        for line in open("/proc/self/maps"):
            if " r" not in line or "[v" in line: continue
            start, _, end = line.split()[0].partition("-")
            memory.seek(int(start, 16))
            try: data = memory.read(int(end, 16) - int(start, 16))
            except (OSError, OverflowError): continue
            for name, (first, second) in halves.items():
                at = data.find(first)
                while at >= 0:
                    if data[at + len(first):at + len(first) + len(second)] == second: found.add(name)
                    at = data.find(first, at + 1)
    return sorted(found)
    """
    assert attempt(body) == "DID ['own']"


def test_the_standard_streams_lead_nowhere(attempt):
    assert attempt("sys.stdin.read(), os.isatty(0), os.isatty(1), os.isatty(2)") == "DID ('', False, False, False)"


def test_the_terminal_of_the_trainer(attempt):
    assert attempt("os.open('/dev/tty', os.O_RDWR)") == "ENXIO"


def test_typing_into_a_terminal(attempt):
    assert attempt("fcntl.ioctl(os.openpty()[1], 0x5412, b'x')") == "EPERM"
    assert attempt("fcntl.ioctl(os.openpty()[1], 0x541C, b'x')") == "EPERM"
