"""Text with control tokens -> ids, with the thousands of control tokens that some tokenizers have."""

from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.model_tokenizer import ModelTokenizer
from tests.data.model_folders import tokenizer_json

MANY = [f"<|place holder {number}|>" for number in range(2000)]
TOK = ModelTokenizer(tokenizer_json(dict.fromkeys(["<|end|>", *MANY], True)), "", "many")


def test_a_long_text_is_searched_once_for_all_control_tokens():
    """A search that asks for each of them at every character takes minutes here."""
    control = ControlText(TOK)
    spelled = "".join(MANY[::500])
    text = "a < b, c <| d\n" * 20_000 + spelled
    mark = control.mark(text)
    guarded = control.guard(text, mark)
    assert control.ids(guarded, mark) == TOK.encode(text)
    assert not any(map(TOK.is_control, TOK.encode(text)))
    ids = control.ids(guarded + spelled + "<|end|>", mark)
    assert ids == [*TOK.encode(text), *map(TOK.id_of, MANY[::500]), TOK.id_of("<|end|>")]
