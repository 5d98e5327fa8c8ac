"""Planted secrets and addresses are in no byte of the folder, and turns that have one are marked."""

import zstandard

from tests.serve.traffic.conftest import all_bytes, stored
from tests.serve.traffic.planted_secrets import planted

PLANTED = planted(200, seed=43)


def test_no_planted_secret_is_text_on_disk_and_all_turns_with_one_are_marked(served, text, folder):
    encode, said = text.tokenizer.encode, {}

    def write(context):
        return [*encode(said.get(tuple(context), "Done.")), *text.end_tokens[:1]]

    with served(write) as (server, writer):
        for i, (words, _) in enumerate(PLANTED):
            if i % 2:  # the model says it
                prompt = encode(f"Task {i}:")
                said[tuple(prompt)] = f"Here it is: {words} Use it."
            else:
                prompt = encode(f"Task {i}: {words} Use it.")
            headers = {"X-User-ID": PLANTED[i][1].split("\n")[0][:200], "X-Repository": f"repo of {i}"}
            first = server.ask(prompt, f"planted {i}", max_tokens=400, headers=headers)
            after = [*prompt, *first["choices"][0]["token_ids"], *encode("Go on.")]
            server.ask(after, f"planted {i}", max_tokens=400, headers=headers)
            server.ask(encode(f"Task {i}: sort a list, then run the tests."), f"plain {i}")
    contents = [zstd_or_plain(data) for data in all_bytes(folder).values()]
    for words, secret in PLANTED:
        lines = [line.encode() for line in secret.split("\n")]
        assert not any(line in data for data in contents for line in lines), words
    sessions = stored(folder)
    for i in range(len(PLANTED)):
        assert [turn.has_secret for turn in sessions[f"planted {i}"].turns] == [True, True], PLANTED[i]
        assert [turn.has_secret for turn in sessions[f"plain {i}"].turns] == [False]


def zstd_or_plain(data):
    if not data.startswith(b"\x28\xb5\x2f\xfd"):
        return data
    return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
