"""The page of training rows: the whole text of a row, with exactly the trained part marked."""

import html
import json
import re

import pytest

from composer_jax.data.chat.conversations import conversation_trace, read_conversation
from composer_jax.errors import UserError
from composer_jax.stages.rows_page import pieces
from composer_jax.stages.run import Run
from composer_jax.stages.sft import show_rows
from tests.data.formats import decode, format_of
from tests.stages.base_model import write_base
from tests.stages.test_base import config_with

CALL = {"type": "function", "function": {"name": "read", "arguments": '{"path": "<b>.py"}'}}
ROW = {
    "messages": [
        {"role": "user", "content": "Go <|im_end|> & see."},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI look.", "tool_calls": [{"id": "1", **CALL}]},
        {"role": "tool", "tool_call_id": "1", "content": "x = 1"},
        {"role": "assistant", "content": "It is 1."},
    ]
}


@pytest.mark.parametrize("name", ["thinks", "xml", "keys", "chatml"])
def test_pieces_are_the_row_and_what_the_loss_counts(name):
    chat = format_of(name)
    trace = conversation_trace(read_conversation(ROW), chat)
    found = pieces(trace, chat.tokenizer)
    assert "".join(piece.text for piece in found) == decode(chat, trace[0].tolist())
    trained = "".join(piece.text for piece in found if piece.trained)
    assert trained == decode(chat, trace[0][trace[1]].tolist())
    assert "hm" in trained and "It is 1." in trained and "x = 1" not in trained
    control = "".join(piece.text for piece in found if piece.control)
    assert control == decode(chat, [i for i in trace[0].tolist() if chat.tokenizer.is_control(i)])


def test_rows_are_shown_and_nothing_is_trained(tmp_path):
    base = write_base(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 3)
    config = config_with(base)
    config.sft.data = str(tmp_path / "rows.jsonl")
    with Run(config, tmp_path / "run") as run:
        page = show_rows(run, 2).read_text()
        with pytest.raises(UserError, match="--show_rows=0 shows nothing"):
            show_rows(run, 0)
    assert page.count("<h2>Row") == 2 and "2 of 3 rows" in page
    shown = html.unescape(re.sub("<[^>]*>", "", page))
    assert "Go <|im_end|> & see." in shown and '"path": "<b>.py"' in shown
    assert not (tmp_path / "run" / "checkpoints").exists()
