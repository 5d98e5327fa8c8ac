"""Published chat templates with published tokenizers: the ids of transformers, whole and turn by turn."""

import pytest

from benchmarks.chat_templates import TEMPLATES, compare

pytestmark = pytest.mark.parity

EXPECTED = {
    "trl/qwen2_5": ("equal", "equal", "equal", "absent"),
    "trl/qwen3": ("equal", "one turn", "equal", "equal"),
    "trl/qwen3_5_think": ("equal", "one turn", "equal", "equal"),
    "trl/qwen3_5_nothink": ("equal", "one turn", "equal", "refused"),
    "trl/qwen3_8": ("equal", "equal", "equal", "equal"),
    "trl/glm4moe": ("equal", "equal", "equal", "equal"),
    "trl/gptoss": ("equal", "one turn", "different", "equal"),  # words beside a call are commentary, not thinking
    "trl/nemotron_3_nano": ("equal", "one turn", "equal", "equal"),
    "trl/deepseekv3": ("equal", "continued", "ours", "continued"),
    "trl/llama3_1": ("equal", "equal", "ours", "absent"),
    "trl/gemma": ("equal", "equal", "ours", "absent"),
    "axolotl/mistral_v7_tekken": ("equal", "equal", "ours", "absent"),
}
"""Template -> what benchmarks/chat_templates.py finds: renders, turn by turn, calls, thinking."""


@pytest.mark.parametrize("template", EXPECTED)
def test_a_published_template_is_what_transformers_makes_of_it(template, tmp_path):
    result = compare(template, TEMPLATES[template], tmp_path)
    assert tuple(result.words.values()) == EXPECTED[template], result.sentences
