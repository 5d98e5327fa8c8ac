"""Shell commands that only do what a tool of the agent does: show, search, list or edit files.

A command line is parsed into its simple commands (shlex). It duplicates a tool if every one of them does a tool's work
or only changes the folder; `python job.py | grep loss` and `ls && pytest` do more and are not duplicates.
"""

import re
import shlex
from collections.abc import Collection, Sequence

READ = frozenset(("read_file", "read"))
GREP = frozenset(("grep",))
LIST = frozenset(("list_dir", "glob"))
EDIT = frozenset(("edit_file", "apply_patch", "edit"))
_NEUTRAL = ("cd", "pushd", "popd", "pwd", "true", ":", "set")
_WRAPPERS = ("command", "time", "env", "xargs", "nice", "sudo")
_SHELLS = ("sh", "bash", "dash", "zsh")
_READERS = ("cat", "head", "tail", "less", "more", "nl", "bat")
_SEARCHERS = ("grep", "egrep", "fgrep", "rg", "ag", "ack")
_ACTIONS = ("-exec", "-execdir", "-ok", "-okdir", "-delete")  # of find: it does more than list
_OPERATORS = re.compile(r"[();<>|&\n]+")
_REDIRECTIONS = re.compile(r"[0-9]?(?:>>?|<<?<?|>\||>&|&>>?|<&)")
_HERE_DOCUMENT = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SINKS = ("/dev/null", "&1", "&2", "1", "2")
_MAX_DEPTH = 3  # nested `bash -c`


def duplicates_tool(command: str, tools: Collection[str]) -> bool:
    """Returns whether a shell command only does what some of `tools` do.

    A command that cannot be parsed is none.

    Args:
      command: the text for bash.
      tools: names of the agent's tools, as the model sees them.
    """
    kinds = _kinds(command, _MAX_DEPTH)
    return bool(kinds) and all(not kind.isdisjoint(tools) for kind in kinds)


def _kinds(command: str, depth: int) -> list[frozenset[str]]:
    """The tools that can do each simple command's work, an empty set for other work; neutral commands are left out."""
    try:
        tokens = _tokens(_without_here_documents(command))
    except ValueError:  # an open quotation
        return [frozenset()]
    kinds: list[frozenset[str]] = []
    words: list[str] = []
    in_pipe = False  # whether the simple command reads the output of the one before it
    for token in [*tokens, ";"]:
        is_end = bool(_OPERATORS.fullmatch(token)) and not _REDIRECTIONS.fullmatch(token)
        if not is_end:
            words.append(token)
            continue
        kinds += _kinds_of_words(words, in_pipe, bool(kinds) and bool(kinds[-1]), depth)
        words, in_pipe = [], "|" in token and "||" not in token
    return kinds


def _kinds_of_words(words: Sequence[str], in_pipe: bool, after_tool: bool, depth: int) -> list[frozenset[str]]:
    words, is_written = _without_redirections(words)
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in _WRAPPERS):
        words = words[1:] if _ASSIGNMENT.match(words[0]) else _without_options(words[1:])
    if not words or words[0] in _NEUTRAL or words[0].startswith("#"):
        return []
    if words[0] in _SHELLS and depth:
        script = next((words[at + 1] for at, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word)), None)
        return [frozenset()] if script is None else _kinds(script, depth - 1)
    name = words[0].rpartition("/")[2]
    if name in ("echo", "printf"):
        return [EDIT] if is_written else []
    if in_pipe and not after_tool and name != "tee":
        return [frozenset()]  # it reads what a program printed, which no tool shows
    return [_kind(name, words[1:], is_written)]


def _kind(name: str, arguments: Sequence[str], is_written: bool) -> frozenset[str]:
    """The tools that do the work of one simple command. is_written: whether its output goes into a file."""
    if name == "sed":
        has = lambda letter: any(re.fullmatch(rf"-[a-zA-Z]*{letter}.*", word) for word in arguments)  # noqa: E731
        return EDIT if has("i") or "--in-place" in arguments or is_written else READ if has("n") else frozenset()
    if name == "perl":
        return EDIT if any(re.fullmatch(r"-[a-z]*i.*", word) for word in arguments) else frozenset()
    if name in _READERS:
        return EDIT if is_written else READ
    if name in ("tee", "patch"):
        return EDIT
    if is_written:
        return frozenset()
    if name in _SEARCHERS or (name == "git" and arguments[:1] == ["grep"]):
        return GREP
    if name in ("ls", "tree", "dir"):
        return LIST
    return LIST if name == "find" and not any(word in _ACTIONS for word in arguments) else frozenset()


def _tokens(command: str) -> list[str]:
    """The words and operators of a command; a line break is an operator. Raises ValueError for an open quotation."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    return list(lexer)


def _without_redirections(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without redirections, and whether the output goes into a file."""
    kept: list[str] = []
    is_written, at = False, 0
    while at < len(words):
        if not _REDIRECTIONS.fullmatch(words[at]):
            kept.append(words[at])
            at += 1
            continue
        if kept and kept[-1] in ("1", "2"):  # the number of a descriptor
            kept.pop()
        target = words[at + 1] if at + 1 < len(words) else ""
        is_written |= ">" in words[at] and target not in _SINKS
        at += 2
    return kept, is_written


def _without_options(words: Sequence[str]) -> list[str]:
    """The words after the options of a wrapper, such as `xargs -n 1`."""
    at = 0
    while at < len(words) and (words[at].startswith("-") or words[at].isdigit() or words[at] == "{}"):
        at += 1
    return list(words[at:])


def _without_here_documents(command: str) -> str:
    """The command without the text of its here-documents, which is data and no command."""
    lines, ends = [], list[tuple[str, bool]]()
    for line in command.split("\n"):
        if ends:
            end, is_indented = ends[0]
            if (line.lstrip("\t") if is_indented else line) == end:
                del ends[0]
            continue
        lines.append(line)
        ends = [(match[3], bool(match[1])) for match in _HERE_DOCUMENT.finditer(line)]
    return "\n".join(lines)
