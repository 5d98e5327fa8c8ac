"""benchmarks/peers without the peers: what their scripts read, the networks of equal cost, and missing peers."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import conversations
from benchmarks.peers import arguments, play_llama_cpp, play_transformers, play_tunix
from benchmarks.peers.environments import PEERS, Peer, PeerError, install, is_installed_here, play_peer, read_pins
from benchmarks.peers.equal_cost import cost_of, cost_of_llama, llama_of_equal_cost
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.rates import PeerRates
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import forward_flops
from composer_jax.models.model_def import ModelDef


@pytest.fixture
def talks():
    return conversations.make_talks(2, 3, 3, vocab_size=100)


@pytest.fixture
def missing(tmp_path):
    """A peer with a package that no index has."""
    requirements = tmp_path / "missing.txt"
    requirements.write_text("--no-index\nno-such-engine==1.0\n")
    return Peer("missing", requirements)


def as_read(talks, tmp_path):
    arguments.write_talks(tmp_path / "talks.json", talks)
    return arguments.read_talks(tmp_path / "talks.json")


def test_the_file_of_conversations_round_trips(talks, tmp_path):
    read = as_read(talks, tmp_path)
    assert [conversations.Talk(**talk) for talk in read] == talks
    assert arguments.count_useful_tokens(read) == sum(sum(talk.lengths) for talk in talks)


@pytest.mark.parametrize("name", ["demo", "wide", "smollm2"])
def test_google_tunix_gets_a_network_of_equal_cost(name):
    config = conversations.model_config(name)
    llama = llama_of_equal_cost(config)
    ours, theirs = cost_of(config), cost_of_llama(llama)
    assert theirs.per_token == pytest.approx(ours.per_token, rel=0.02)
    assert theirs.per_pair == pytest.approx(ours.per_pair, rel=0.02)
    assert (llama["embed_dim"], llama["num_layers"]) == (config.d_model, config.n_layers)
    if not config.n_mtp_modules:
        assert forward_flops(config, 100) == 100 * ours.per_token + 100 * 101 / 2 * ours.per_pair


def test_a_peer_that_cannot_be_installed_is_named_and_left_out(missing, tmp_path, capsys):
    rates = PeerRates([missing], [], tmp_path / "cache")
    rates.play_round()
    error = capsys.readouterr().err
    assert "missing cannot be installed" in error and "no-such-engine" in error and "missing is not compared" in error
    assert rates.ratios(100.0) == {}
    rates.play_round()  # without another attempt
    assert capsys.readouterr().err == ""


def test_a_peer_that_fails_later_is_left_out(monkeypatch, tmp_path, capsys):
    slow = iter([50.0, None])

    def play(peer, *_):
        rate = 20.0 if peer.name == "fast" else next(slow)
        if rate is None:
            raise PeerError("slow broke")
        return {"tokens_per_s": rate}

    monkeypatch.setattr("benchmarks.peers.rates.play_peer", play)
    rates = PeerRates([Peer("fast", tmp_path), Peer("slow", tmp_path)], [], tmp_path)
    rates.play_round()
    assert rates.ratios(100.0) == {"vs_fast": 5.0, "vs_slow": 2.0}
    rates.play_round()
    assert capsys.readouterr().err.endswith("slow broke\nslow is not compared\n")
    rates.play_round()
    assert rates.ratios(100.0) == {"vs_fast": 5.0}


def test_an_environment_is_used_again_until_its_requirements_change(tmp_path, monkeypatch):
    requirements = tmp_path / "peer.txt"
    requirements.write_text("--no-index\n")
    monkeypatch.setattr("benchmarks.peers.environments.is_installed_here", lambda _: False)
    peer = Peer("empty", requirements)
    python = install(peer, tmp_path)
    assert subprocess.run([python, "-c", ""], check=False).returncode == 0
    made = python.lstat().st_ino
    assert install(peer, tmp_path) == python and python.lstat().st_ino == made
    requirements.write_text("--no-index\nno-such-engine==1.0\n")
    with pytest.raises(PeerError, match="no-such-engine"):
        install(peer, tmp_path)


def test_this_environment_serves_where_it_has_the_packages(tmp_path):
    requirements = tmp_path / "peer.txt"
    requirements.write_text(f"# a comment\nnumpy=={np.__version__}\n")
    assert read_pins(requirements) == {"numpy": np.__version__}
    assert is_installed_here(requirements)
    assert str(install(Peer("here", requirements), tmp_path)) == sys.executable
    requirements.write_text("numpy==0.1\n")
    assert not is_installed_here(requirements)
    with pytest.raises(PeerError, match="here cannot play the conversations.*play_here"):
        requirements.write_text(f"numpy=={np.__version__}\n")
        play_peer(Peer("here", requirements), [], tmp_path)


def test_the_requirements_of_every_peer_are_pinned():
    packages = {"tunix": "google-tunix", "transformers": "transformers", "llama_cpp": "llama-cpp-python"}
    for name, peer in PEERS.items():
        lines = peer.requirements.read_text().splitlines()
        pins = read_pins(peer.requirements)
        assert packages[name] in pins
        assert len(pins) == sum(not line.startswith(("#", "--no-binary")) for line in lines)


def test_the_scripts_of_the_peers_need_no_jax():
    scripts = ", ".join(f"benchmarks.peers.play_{name}" for name in PEERS)
    code = f"import {scripts}, sys; print([m for m in ('jax', 'composer_jax', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_gguf_file_has_the_network_and_its_weights(tmp_path):
    pytest.importorskip("safetensors", reason="needs the packages of requirements-parity.txt")
    config = ModelConfig(
        vocab_size=96,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        qk_rope_dim=8,
        v_head_dim=8,
        rope_halves=True,
        dense_ff_dim=64,
        rope_theta=1000.0,
        tie_embeddings=True,
        max_context=128,
        param_dtype="float32",
        compute_dtype="float32",
    )
    definition = ModelDef(config)
    params, router_bias = definition.init(0)
    save_hf(tmp_path / "hf", definition, params, router_bias)
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf")
    loaded, restored, _ = open_checkpoint(f"gguf:{tmp_path / 'model.gguf'}").load()
    for field in ("vocab_size", "d_model", "n_layers", "n_kv_heads", "dense_ff_dim", "rope_theta", "norm_eps"):
        assert getattr(loaded.config, field) == pytest.approx(getattr(config, field))
    jax.tree.map(np.testing.assert_array_equal, params, restored)

    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(described | {"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="not a plain Llama network"):
        write_gguf(tmp_path / "hf", tmp_path / "other.gguf")


class CountingContext:
    """Stands for llama.cpp's context: a token is the number of tokens before it."""

    def __init__(self):
        self.computed = {}
        self.copies = []

    def clear(self):
        self.computed.clear()

    def copy(self, source, target):
        self.computed[target] = list(self.computed[source])
        self.copies.append((source, target))

    def step(self, conversations):
        for conversation in conversations:
            tokens = self.computed.setdefault(conversation.sequence, [])
            assert conversation.computed == len(tokens) and conversation.new_tokens
            tokens += conversation.new_tokens
            conversation.computed = len(tokens)
            conversation.new_tokens = []
            conversation.add_sampled(len(tokens))


def replay(talk):
    """The context of a conversation in which each sampled token is the number of tokens before it."""
    context = list(talk.prompt)
    for observation, length in zip([*talk.observations, []], talk.lengths, strict=True):
        for _ in range(length):
            context.append(len(context))
        context += observation
    return context


def test_llama_cpp_gets_every_token_once_and_each_prompt_once_for_a_group(talks, tmp_path):
    context = CountingContext()
    first = play_llama_cpp.play(context, as_read(talks, tmp_path))
    assert context.copies == [(0, 1), (0, 2), (3, 4), (3, 5)]
    for sequence, talk in enumerate(talks):
        assert context.computed[sequence] == replay(talk)[:-1]  # nothing follows the last token
    assert first == replay(talks[0])[len(talks[0].prompt) :][: talks[0].lengths[0]]


def test_transformers_gets_the_whole_context_each_turn(talks, tmp_path, monkeypatch):
    calls = []

    def generate(model, contexts, length):
        calls.append(([list(context) for context in contexts], length))
        return [list(range(len(context), len(context) + length)) for context in contexts]

    monkeypatch.setattr(play_transformers, "generate", generate)
    play_transformers.play(None, as_read(talks, tmp_path))
    assert [length for _, length in calls] == [max(talk.lengths[turn] for talk in talks) for turn in range(3)]
    for number, talk in enumerate(talks):
        last = len(replay(talk)) - talk.lengths[-1]
        assert calls[-1][0][number] == replay(talk)[:last]


def test_google_tunix_gets_a_sampler_with_the_shapes_of_each_turn(talks, tmp_path, monkeypatch):
    class Sampler:
        def __init__(self, model, longest_context, longest_message):
            self.longest_context, self.longest_message = longest_context, longest_message

        def sample(self, contexts, lengths):
            assert (max(map(len, contexts)), max(lengths)) == (self.longest_context, self.longest_message)
            self.contexts = [list(context) for context in contexts]
            return [list(range(len(context), len(context) + n)) for context, n in zip(contexts, lengths, strict=True)]

    monkeypatch.setattr(play_tunix, "TurnSampler", Sampler)
    samplers = play_tunix.make_samplers(None, as_read(talks, tmp_path))
    play_tunix.play(samplers, as_read(talks, tmp_path))
    for number, talk in enumerate(talks):
        last = len(replay(talk)) - talk.lengths[-1]
        assert samplers[-1].contexts[number] == replay(talk)[:last]
    tokenizer = play_tunix.NumberTokenizer(100)
    assert tokenizer.encode(tokenizer.decode([3, 99])) == [3, 99] and tokenizer.eos_id() == 100
