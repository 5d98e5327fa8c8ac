"""The parent of a prompt, against a slow search, and what finding it costs."""

import hashlib
import types

from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.serve.traffic import conversation_tree
from composer_jax.serve.traffic.conversation_tree import ConversationTree, TreeNode
from tests.many import many


def add_turn(tree, name, prompt, answer):
    parent, digest = tree.find_parent(prompt, answer)
    tree.add(TreeNode(name, len(prompt) + len(answer), digest))
    return parent.id


@settings(max_examples=many(200))
@given(st.data())
def test_the_parent_is_the_longest_turn_that_begins_the_prompt(data):
    tree, whole = ConversationTree(), {}
    for i in range(data.draw(st.integers(1, 12))):
        begin = data.draw(st.sampled_from([[], *whole.values()]))
        cut = data.draw(st.integers(0, len(begin)))
        prompt = [*begin[:cut], *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))]
        answer = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        longest = max((len(ids) for ids in whole.values() if prompt[: len(ids)] == ids), default=0)
        fits = [name for name, ids in whole.items() if len(ids) == longest and prompt[:longest] == ids]
        parent = add_turn(tree, str(i), prompt, answer)
        assert parent == (fits[-1] if fits else "")  # of equal turns, the last
        whole[str(i)] = prompt + answer


def test_forks_retries_and_compaction():
    tree = ConversationTree()
    assert add_turn(tree, "a", [1, 2], [3]) == ""
    assert add_turn(tree, "b", [1, 2, 3, 4], [5]) == "a"
    assert add_turn(tree, "retry of a", [1, 2], [7]) == ""
    assert add_turn(tree, "fork", [1, 2, 3, 9], [9]) == "a"
    assert add_turn(tree, "c", [1, 2, 3, 4, 5, 6], [6]) == "b"
    assert add_turn(tree, "compacted", [8, 8], [8]) == ""
    assert add_turn(tree, "after", [8, 8, 8, 1], [1]) == "compacted"


def test_a_prompt_is_hashed_once_however_many_turns_there_are(monkeypatch):
    counts = {"bytes": 0, "digests": 0}

    class Counting:
        def __init__(self, **options):
            self.state = hashlib.blake2b(**options)

        def update(self, data):
            counts["bytes"] += len(data)
            self.state.update(data)

        def digest(self):
            counts["digests"] += 1
            return self.state.digest()

    monkeypatch.setattr(conversation_tree, "hashlib", types.SimpleNamespace(blake2b=Counting))
    tree, prompt, lengths = ConversationTree(), [], set()
    for i in range(300):
        prompt = [*prompt, *range(i % 7 + 1)]
        counts.update(bytes=0, digests=0)
        for retry in range(3):  # turns of the same length cost no further digest
            add_turn(tree, f"{i} {retry}", prompt, [retry])
        fits = [length for length in lengths if length <= len(prompt)]
        assert counts["bytes"] == 3 * 4 * (len(prompt) + 1)
        assert counts["digests"] <= 3 * (len(fits) + 1)
        lengths.add(len(prompt) + 1)
        prompt = [*prompt, 2]
