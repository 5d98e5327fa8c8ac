"""Sessions that a server stored are labelled in their own database, and forgotten with their labels."""

import contextlib
import time

from composer_jax.data.chat.chat_format import Message
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_types import ChatText, LabelContext
from composer_jax.realtime.labels.store import LabelStore
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.retention import forget

H = 3600.0


def test_labels_of_a_folder(served, text, folder):
    chat = text.chat_format
    prompt = list(chat.render([Message("user", "Fix the parser")])) + list(chat.generation_prompt)
    answer = list(chat.render_assistant("Done.", []))
    with served(lambda context: answer) as (server, _):
        for session in ("a", "b"):
            server.ask(prompt, session, max_tokens=len(answer))
            reply = [*prompt, *answer, *chat.close(answer), *chat.user(["It does not work"]), *chat.generation_prompt]
            server.ask(reply, session, max_tokens=len(answer))
    context = LabelContext(ChatText(chat))
    with contextlib.closing(open_database(folder)) as database:
        run = label_sessions(TrafficFolder(folder), database, H, context=context, clock=lambda: time.time() + 3 * H)
        assert [label.session for label in run.labels] == ["a", "b"]
        for label in run.labels:
            assert list(label.signals["follow_up"].by_turn.values()) == [-1.0]
            assert label.signals["keep"].state == "censored"
        forget(folder, session="a")
        assert [label.session for label in LabelStore(database).read(H)] == ["b"]
