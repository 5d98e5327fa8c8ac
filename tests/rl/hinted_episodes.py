"""Episodes with malformed calls in our compact format, for the tests of feedback."""

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.messages import ToolCall
from tests.data.formats import format_of
from tests.rl.made_up import episode

CHAT = format_of("compact")
TOOLS = ("read", "grep", "finish")
READ = CHAT.render_assistant("", [ToolCall("read", {"path": "a"})])
FINISH = CHAT.render_assistant("", [ToolCall("finish", {})])
BAD = [CHAT.tokenizer.call, *CHAT.tokenizer.encode("finish"), CHAT.end]
"""A call without arguments."""
REASON = "no arguments"


def transcript_of(*messages: list[int], task: str = "do it", routes=None) -> Transcript:
    """A transcript in which the model says these messages, each of which a tool answers.

    routes: number of tokens -> routes of so many tokens; None records none.
    """
    transcript = Transcript()
    tok = CHAT.tokenizer
    transcript.append("prompt", [tok.bos, *CHAT.user([task])])
    for message in messages:
        n = transcript.length + len(CHAT.generation_prompt) + len(message)
        recorded = None if routes is None else routes(n - 1)
        logprobs = [-1.0] * len(message)
        transcript.append("assistant", CHAT.generation_prompt, message, logprobs, [0] * len(message), routes=recorded)
        answered = len(CHAT.parse(message).calls)
        for answer in CHAT.bridge(message, ["ERROR no" if message == BAD else "ok"] * answered):
            transcript.append("tool", answer)
    return transcript


def episode_of(*messages: list[int], reward: float = 0.0, **options) -> Episode:
    return episode(reward, transcript_of(*messages, **options), tools=TOOLS)
