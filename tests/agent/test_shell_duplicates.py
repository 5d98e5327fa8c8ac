"""Shell commands that do the work of a tool."""

import pytest

from composer_jax.agent.shell_duplicates import duplicates_tool
from composer_jax.agent.tools.repository import TOOLS


@pytest.mark.parametrize(
    "command",
    [
        "cat a.py",
        "cat a.py | head -20",
        "cat a.py 2>/dev/null; echo ---; tail -n 5 b.py",
        "cd src && sed -n '1,20p' a.py",
        "grep -rn 'a|b' . | head",
        "LC_ALL=C rg foo src",
        "git grep foo",
        "find . -name '*.py' | xargs grep -n foo",
        "ls -la\ncat x",
        "sed -i 's/a/b/' x.py",
        "perl -pi -e 's/a/b/' x.py",
        "cat > a.py <<'EOF'\nimport os; os.system('pytest')\nit's\nEOF",
        "cat <<-END >> a.py\n\ttext\n\tEND\nls",
        "echo 'x' > a.py",
        "printf x | tee a.py",
        "bash -lc 'cat a.py'",
        "cat $(find . -name a.py)",
    ],
)
def test_showing_searching_listing_and_editing_are_what_tools_do(command):
    assert duplicates_tool(command, TOOLS)


@pytest.mark.parametrize(
    "command",
    [
        "python -m pytest -q",
        "pytest 2>&1 | tail -5",
        "python a.py | grep loss",
        "ls && pytest",
        "cat a.py | python -",
        "python - <<'EOF'\ncat a.py\nEOF",
        "bash run.sh",
        "bash -c 'cat a.py; make'",
        "find . -name '*.pyc' -delete",
        "find . -exec rm {} +",
        "sed 's/a/b/' x",
        "grep -c x y | wc -l",
        "ls > out.txt",
        "for f in *; do cat $f; done",
        "git status",
        "python -c \"print('cat a.py; grep x')\"",
        "echo done",
        "cd src",
        "cat 'open",
        "  ",
    ],
)
def test_other_work_is_not_a_duplicate(command):
    assert not duplicates_tool(command, TOOLS)


def test_a_command_duplicates_only_tools_that_the_agent_has():
    assert duplicates_tool("cat a.py", ("read", "shell")) and not duplicates_tool("cat a.py", ("grep", "shell"))
    assert not duplicates_tool("cat a.py && sed -i s/a/b/ a.py", ("read", "shell"))
