"""UserConversation: a conversation of several requests about one workspace, each of them an episode of the harness.

The first request is a task's instruction. A later one is a message that a user sends after the agent has ended: the
agent gets its tools again, and sees the whole conversation so far. Sampled tokens stay the ids that were sampled.
"""

import dataclasses
from collections.abc import Sequence

from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.tools import select_tools
from composer_jax.agent.transcript import Transcript
from composer_jax.agent.turns import Turn, find_turns
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample, Session
from composer_jax.tasks.task import Task

EDIT, EDITED = "edit", "ok"
"""The tool that changes files, and its answer when it has (agent/tools/compact.py)."""


@dataclasses.dataclass(frozen=True)
class EditedLine:
    """One line of a file that an answer changed."""

    answer: int
    """Number of the answer in the conversation, from 0."""
    path: str
    line: int
    """From 0."""


class UserConversation:
    """One conversation. Session and context are those of run_episode, without a system message; tasks have the compact
    tools and no repository.

    Attributes:
      episodes: one for each request so far.
      turns: the answers so far, with their calls.
      transcript: all of it in one branch, with a node of kind "prompt" for each message of the user.
      files: path -> text as the agent left it.
      edits: lines that the agent changed, in the order of the changes.
    """

    def __init__(self, task: Task, session: Session, context: EpisodeContext, seed: int) -> None:
        """seed: uint32; that of the episodes. The session has a seed of its own."""
        self.task, self.episodes, self.files = task, list[Episode](), dict(task.files)
        self.turns, self.transcript, self.edits = list[Turn](), Transcript(), list[EditedLine]()
        self._session, self._context, self._seed = session, context, seed

    async def request(self, text: str, max_turns: int) -> Episode:
        """Plays what follows a message of the user, and returns it graded as if the work ended there.

        max_turns: messages of the agent.

        Raises UserError if the infrastructure loses the episode.
        """
        number, chat = len(self.episodes), self._context.chat
        if self._context.settings.system_prompt:
            raise UserError("a conversation of the demo has no system message; use agent.system_prompt=''.")
        task = dataclasses.replace(
            self.task, id=f"{self.task.id}-{number}", instruction=text, files=dict(self.files), max_turns=max_turns
        )
        available = select_tools(task.tools).values()
        prompt = [] if number == 0 else chat.render([Message("user", text)], available)
        beginning = self._beginning(text)
        session = _ContinuedSession(self._session, len(prompt), beginning)
        episode = await run_episode(EpisodeSpec(task, self._seed, Compaction(None)), session, self._context)
        if episode.reward is None:
            raise UserError(f"the episode of {task.id} is lost: {episode.detail}; start the command again.")
        self._extend(episode.transcript, beginning)
        for turn in find_turns(episode.transcript, chat, available):
            self._apply(len(self.turns), turn)
            self.turns.append(turn)
        self.episodes.append(episode)
        return episode

    def _beginning(self, text: str) -> list[int]:
        """Returns the ids before the next answer and its generation prompt; [] leaves them to the harness."""
        if not self.episodes:
            return []
        chat, last = self._context.chat, self.episodes[-1].transcript.path()[-1]
        closing = chat.close(last.sampled_tokens.tolist()) if last.sampled else []
        return [*self.transcript.tokens, *closing, *chat.user([text])]

    def _extend(self, episode: Transcript, beginning: Sequence[int]) -> None:
        """Adds the nodes of an episode, the first of which is its prompt."""
        prompt, *others = episode.path()
        new = beginning[self.transcript.length :] if beginning else prompt.tokens
        self.transcript.append("prompt", new)
        for node in others:
            sampled = node.sampled_tokens, node.logprobs, node.versions
            self.transcript.append(node.kind, node.harness_tokens, *sampled, trained=node.trained)

    def _apply(self, answer: int, turn: Turn) -> None:
        """Makes the edits of an answer that the tool has made."""
        for call, said in zip(turn.message.calls, turn.answers, strict=False):
            if isinstance(call, ToolCall) and call.name == EDIT and said == EDITED:
                path, old, new = (call.arguments[name] for name in ("path", "old", "new"))
                before = self.files[path]
                self.edits.append(EditedLine(answer, path, before[: before.index(old)].count("\n")))
                self.files[path] = before.replace(old, new)


class _ContinuedSession:
    """A Session that puts an earlier conversation in the place of an episode's prompt."""

    def __init__(self, session: Session, replaced: int, beginning: Sequence[int]) -> None:
        """replaced: tokens of the prompt, in whose place `beginning` stands."""
        self._session, self._replaced, self._beginning = session, replaced, list(beginning)
        self.max_model_len = session.max_model_len + replaced - len(self._beginning)

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        return await self._session.sample(self.whole(context), params, branch=branch)

    def whole(self, tokens: Sequence[int]) -> list[int]:
        """Returns the ids of the conversation for those of the episode."""
        return [*self._beginning, *tokens[self._replaced :]]

    def close(self) -> None:
        """Leaves the session open."""
