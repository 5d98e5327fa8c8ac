"""What a model thinks as the beginning of its message: THINKING[0], the thoughts, THINKING[1], then what it says.

APIs and data sets hold the thoughts in a field of their own (`reasoning_content`); chat templates find them in the
content. `join_thinking` and `split_thinking` lead from one form to the other and back.
"""

from composer_jax.data.chat.messages import THINKING


def join_thinking(reasoning: str, content: str) -> str:
    """Returns a content that begins with these thoughts, as chat templates write it; without any, the content.

    `split_thinking` gives both back, without line breaks at their edges. Raises ValueError if either would be cut
    elsewhere.
    """
    if not reasoning.strip():
        return content
    if THINKING[1] in reasoning:
        raise ValueError(f"holds {THINKING[1]}, which would end it early")
    if content.lstrip().startswith(THINKING[0]):
        raise ValueError(f"is given, and its content begins with {THINKING[0]}, too; keep one of them")
    return with_thinking(reasoning.strip("\n"), content.lstrip("\n"))


def with_thinking(thought: str, said: str) -> str:
    """Returns the content of a message with these two parts, as they are (messages.AssistantMessage)."""
    return f"{THINKING[0]}\n{thought}\n{THINKING[1]}\n\n{said}"


def split_thinking(text: str, thinks: bool = False) -> tuple[str, str]:
    """Returns (what the model thought, what it said after). thinks: whether the prompt has opened the thinking."""
    begun = text.lstrip()
    if begun.startswith(THINKING[0]):
        text = begun[len(THINKING[0]) :]
    elif not thinks:
        return "", text
    thought, ended, said = text.partition(THINKING[1])
    return thought.strip("\n") if thought.strip() else "", said.lstrip("\n") if ended else ""
