"""Model: what load_hf returns generates text, answers conversations, and is a Policy that plays episodes."""

import asyncio
import dataclasses
import json

import jax
import numpy as np
import pytest

import composer_jax
from composer_jax.agent.episode_context import EpisodeLimits, EpisodeSettings
from composer_jax.checkpoint.native import model_notes
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.models import supported_dtype
from composer_jax.models.model_def import ModelDef
from composer_jax.ops.local_gpu import LocalGpu
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler import cache_memory
from composer_jax.sampler.config import SamplerConfig
from composer_jax.stages.model import SMALLEST_CAPACITY, Model
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Task
from tests.data.model_folders import QWEN, QWEN_TOKENS, tokenizer_json
from tests.rl.scripted_policy import ScriptedPolicy
from tests.stages.small_model import CONFIG, TEXT, WEIGHTS, greedy_tokens, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return composer_jax.load_hf(folder, dtype="float32")


def test_a_model_has_network_weights_mesh_tokenizer_and_chat_format(model):
    jax.tree.map(np.testing.assert_array_equal, (model.params, model.router_bias), WEIGHTS)
    assert model.definition.config.d_model == CONFIG.d_model and model.mesh.devices.size == 1
    assert model.tokenizer.decode(model.tokenizer.encode(TEXT)) == TEXT
    assert isinstance(model.chat_format, CompactFormat)
    assert (model.defaults.temperature, model.defaults.top_p, model.defaults.top_k) == (1.0, 1.0, 0)
    assert model.text.end_tokens == (model.chat_format.end, model.tokenizer.eod)


def test_weights_in_bfloat16_are_computed_with_in_float32_on_a_card_without_it(folder, monkeypatch):
    monkeypatch.setattr(supported_dtype, "local_gpu", lambda: LocalGpu("Tesla T4", (7, 5), 91002))
    model = composer_jax.load_hf(folder, dtype="bfloat16")
    assert model.definition.config.compute_dtype == "float32"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {model.definition.config.param_dtype}
    assert model.definition.config.param_dtype == "bfloat16"


def test_loading_compiles_no_sampler(folder):
    fresh = composer_jax.load_hf(folder, dtype="float32")
    assert fresh._sampler is None


def test_generate_is_greedy_at_temperature_0(model):
    prompt = model.text.encode_prompt(TEXT)
    expected = greedy_tokens(prompt, 24, model.text.end_tokens)
    assert model.generate(prompt, max_tokens=24, temperature=0) == expected
    assert model.generate(TEXT, max_tokens=24, temperature=0, seed=5) == model.text.decode(expected)


def test_pieces_of_a_stream_join_to_the_text(model):
    for seed in range(3):
        options = dict(max_tokens=40, temperature=0.8, top_p=0.9, seed=seed)
        whole, pieces = model.generate(TEXT, **options), list(model.generate(TEXT, stream=True, **options))
        assert "".join(pieces) == whole and len(pieces) > 1 and all(pieces)
        ids = model.generate(model.text.encode_prompt(TEXT), **options)
        assert model.text.decode(ids) == whole
    assert whole != model.generate(TEXT, **options | {"seed": 1})


def test_a_stream_may_be_left(model):
    pieces = model.generate(TEXT, max_tokens=200, stream=True)
    first = next(pieces)
    pieces.close()
    assert model.generate(TEXT, max_tokens=200).startswith(first)


def test_a_stop_text_ends_the_output_and_is_part_of_it(model):
    whole = model.generate(TEXT, max_tokens=40, temperature=0)
    stop = whole[3:5]
    for stops in (stop, ["never written", stop]):
        assert model.generate(TEXT, max_tokens=40, temperature=0, stop=stops) == whole[: whole.index(stop) + 2]


def test_chat_answers_in_the_chat_format(model):
    conversation = [Message("user", "add?")]
    ids = [*model.chat_format.render(conversation), *model.chat_format.generation_prompt]
    expected = model.chat_format.text(greedy_tokens(ids, 20, model.text.end_tokens))
    for messages in ("add?", conversation, [{"role": "user", "content": "add?"}]):
        assert model.chat(messages, max_tokens=20, temperature=0) == expected
    assert "".join(model.chat("add?", max_tokens=20, temperature=0, stream=True)) == expected
    longer = [
        {"role": "system", "content": "Brief."},
        *conversation,
        AssistantMessage("no", (), True),
        Message("user", "?"),
    ]
    assert model.text.encode_chat(longer)[: -len(model.chat_format.generation_prompt)] == model.chat_format.render(
        [Message("system", "Brief."), *longer[1:]]
    )


def test_a_long_text_gets_a_larger_context(folder):
    model = composer_jax.load_hf(folder, dtype="float32")
    assert (
        len(model.generate([7, 9], max_tokens=5, stop=())) <= 5
        and model._sampler.config.max_model_len == SMALLEST_CAPACITY
    )
    prompt = [7, 9] * 310
    tokens = model.generate(prompt, max_tokens=500, temperature=0)
    assert model._sampler.config.max_model_len == CONFIG.max_context
    assert tokens == greedy_tokens(prompt, 20, model.text.end_tokens)  # 20 is what the context has left


def test_a_model_whose_cache_did_not_fit_samples_once_it_does(folder, monkeypatch):
    model = composer_jax.load_hf(folder, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(cache_memory, "free_memory", lambda mesh: 0.0)
        with pytest.raises(UserError, match="free beside the weights"):
            model.generate([7, 9], max_tokens=5)
    prompt = [7, 9]
    assert model.generate(prompt, max_tokens=3, temperature=0) == greedy_tokens(prompt, 3, model.text.end_tokens)


def test_end_ids_and_parameters_come_from_generation_config(folder, tmp_path):
    (first, second) = greedy_tokens([7, 9], 2, ())
    path = write_model(tmp_path / "hf", generation={"do_sample": False, "eos_token_id": [second, 3], "top_k": None})
    model = composer_jax.load_hf(path, dtype="float32")
    assert model.defaults.temperature == 0 and {second, 3} < set(model.text.end_tokens)
    assert first not in model.text.end_tokens and model.generate([7, 9]) == [first, second]
    config = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 4}
    (path / "generation_config.json").write_text(json.dumps(config))
    params = composer_jax.load_hf(path, dtype="float32").text.params(max_tokens=3, top_p=0.5)
    assert params == SamplingParams(3, 0.7, 0.5, 20)


def test_a_parameter_that_the_sampler_lacks_is_named(tmp_path):
    generation = {"repetition_penalty": 1.1, "min_p": 0.0, "typical_p": None}
    model = composer_jax.load_hf(write_model(tmp_path / "hf", generation=generation), dtype="float32")
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.1, which the sampler does not apply") as caught:
        assert model.defaults.temperature == 1
    assert len(caught) == 1


@pytest.mark.parametrize("config", [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": True}], ids=str)
def test_a_generation_config_of_other_types_is_refused(tmp_path, config):
    model = composer_jax.load_hf(write_model(tmp_path / "hf", generation=config), dtype="float32")
    with pytest.raises(UserError, match=r"generation_config.json has \w+=.*, which is not a number"):
        model.generate("x")


def test_a_folder_without_a_tokenizer_loads_and_continues_ids(tmp_path):
    model = composer_jax.load_hf(write_model(tmp_path / "hf", tokenizer=False), dtype="float32")
    assert model.text.end_tokens == ()
    assert model.generate([7, 9], max_tokens=6, temperature=0) == greedy_tokens([7, 9], 6, ())
    for use in (lambda: model.generate("x"), lambda: model.chat("x"), lambda: model.tokenizer):
        with pytest.raises(UserError, match="has no tokenizer.json"):
            use()


def test_a_folder_without_a_template_continues_text_and_refuses_to_chat(tmp_path):
    folder = write_model(tmp_path / "hf", tokenizer=False)
    (folder / "tokenizer.json").write_text(tokenizer_json({"<|endoftext|>": True}, vocab_size=280))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    model = composer_jax.load_hf(folder, dtype="float32")
    assert isinstance(model.generate("user", max_tokens=4), str)
    with pytest.raises(UserError, match="has no chat template"):
        model.chat("x")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Model:
    """A model with a published template, which declares tools."""
    folder = write_model(tmp_path_factory.mktemp("qwen") / "hf", tokenizer=False)
    (folder / "tokenizer.json").write_text(tokenizer_json(QWEN_TOKENS, vocab_size=270))
    config = {"eos_token": "<|im_end|>", "chat_template": QWEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return composer_jax.load_hf(folder, dtype="float32")


def test_a_published_template(qwen):
    model = qwen
    assert model.text.end_tokens[0] == model.chat_format.end == model.chat_format.tokenizer.id_of("<|im_end|>")
    assert isinstance(model.chat("add?", max_tokens=8), str)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    folder = write_model(tmp_path / "hf", tokenizer=False)
    (folder / "tokenizer.json").write_text(tokenizer_json(QWEN_TOKENS, vocab_size=400))
    model = composer_jax.load_hf(folder, dtype="float32")
    with pytest.raises(UserError, match="ids and the embedding 290 rows"):
        model.generate("x")


CALLED = [AssistantMessage("", (ToolCall("read", {"path": "a.py"}),), True)]


def test_a_conversation_with_tools_is_openais_or_ours(model):
    call = {"id": "7", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    rows = [
        {"role": "user", "content": [{"type": "text", "text": "add?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "7", "content": "x = 1"},
        {"role": "user", "content": "and now?"},
    ]
    ours = [Message("user", "add?"), *CALLED, Message("tool", "x = 1"), Message("user", "and now?")]
    rendered = model.chat_format.render(ours)
    assert model.text.encode_chat(rows) == model.text.encode_chat(ours)
    assert model.text.encode_chat(rows)[: len(rendered)] == rendered
    assert isinstance(model.chat(rows, max_tokens=2), str)


def test_tools_are_declared_as_the_format_does(qwen):
    tool = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {}}}
    declared = qwen.tokenizer.decode(qwen.text.encode_chat("add?", [tool]))
    assert "Reads." in declared and "Reads." not in qwen.tokenizer.decode(qwen.text.encode_chat("add?"))


BAD = {
    "the prompt is empty; give a text": lambda m: m.generate(""),
    "the prompt is empty; give at least one token": lambda m: m.generate([]),
    "the prompt is empty: a message": lambda m: m.chat(""),
    "the conversation is empty": lambda m: m.chat([]),
    "ends with a message of the model": lambda m: m.chat([Message("user", "a"), AssistantMessage("b", (), True)]),
    "message 1: 'robot' is not a role": lambda m: m.chat([{"role": "robot", "content": "a"}]),
    "message 1: its content is not text": lambda m: m.chat([{"role": "user", "content": 3}]),
    "message 1: it is the answer of a tool, and no call": lambda m: m.chat([{"role": "tool", "content": "a"}]),
    "the last tool calls have no answers": lambda m: m.chat([Message("user", "a"), *CALLED]),
    "cannot be written: tool 1 has no function": lambda m: m.chat("a", tools=[{"type": "function"}]),
    "the prompt has 640 tokens, and the context of": lambda m: m.generate([5] * 640),
    "the prompt has the token id 290; those of": lambda m: m.generate([5, 290]),
    "max_tokens=0 leaves nothing": lambda m: m.generate("a", max_tokens=0),
    "temperature=-1 is not a temperature": lambda m: m.generate("a", temperature=-1, stream=True),
    "top_p=0 is not above 0": lambda m: m.chat("a", top_p=0),
    "stop_strings has an empty text": lambda m: m.chat("a", stop=""),
}


@pytest.mark.parametrize(("sentence", "use"), BAD.items(), ids=BAD)
def test_bad_input_is_refused_at_once(model, sentence, use):
    with pytest.raises(UserError, match=sentence) as refused:
        use(model)
    assert "\n" not in str(refused.value)


def test_weights_on_a_mesh_generate_the_same(model, folder):
    mesh = make_mesh(jax.devices()[:4], data=2, tensor=2)
    sharded = composer_jax.load_hf(folder, mesh, "float32")
    assert sharded.mesh is mesh
    for options in ({"temperature": 0}, {"temperature": 0.7, "top_p": 0.8, "top_k": 40}):
        assert sharded.generate([7, 9], max_tokens=12, **options) == model.generate([7, 9], max_tokens=12, **options)


def test_native_checkpoints_and_run_folders_load_as_models(model, folder, tmp_path):
    definition = ModelDef(CONFIG)
    for stage in ("pretrain", "sft"):
        weights = WEIGHTS if stage == "sft" else jax.tree.map(lambda leaf: leaf * 0, WEIGHTS)
        with CheckpointStore(tmp_path / "run/checkpoints" / stage, notes=model_notes(definition)) as store:
            store.save(3, arrays={"params": weights[0], "router_bias": weights[1]})
    (tmp_path / "run/checkpoints/rl").mkdir()  # has begun
    (tmp_path / "run/stages").mkdir()
    for stage in ("pretrain", "sft"):
        (tmp_path / f"run/stages/{stage}.json").write_text("{}")
    (tmp_path / "run/config.json").write_text('{"config_hash": "0", "config": {}}')
    (tmp_path / "run/data").mkdir()
    (tmp_path / "run/data/tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    expected = model.chat("add?", max_tokens=8, temperature=0)
    for address in (tmp_path / "run", tmp_path / "run/checkpoints/sft"):
        assert composer_jax.load_model(str(address)).chat("add?", max_tokens=8, temperature=0) == expected


# -- as a policy -----------------------------------------------------------------------------------------------------

TASK = Task(
    "t",
    "family",
    "train",
    "price() must subtract.",
    {"price.py": "def price(a, b):\n    return a + b\n"},
    ("edit", "finish"),
    CaseGrader((Case("price", "price", (5, 2), 3),)),
)


def test_sessions_of_a_model_go_on_and_are_streamed(model):
    async def main():
        async with model.serving() as policy:
            session = await policy.open(3)
            assert session.max_model_len == CONFIG.max_context
            first = await session.sample([7, 9], SamplingParams(4, temperature=0))
            second = await session.sample([7, 9, *first.tokens, 11], SamplingParams(4, temperature=0))
            session.close()
            return first.tokens, second.tokens

    first, second = asyncio.run(main())
    ends = model.text.end_tokens
    assert first == greedy_tokens([7, 9], 4, ends) and second == greedy_tokens([7, 9, *first, 11], 4, ends)


def test_generate_inside_serving_is_refused(model):
    async def main():
        async with model.serving():
            await asyncio.to_thread(model.generate, "a", max_tokens=3)

    with pytest.raises(RuntimeError, match="serving already"):
        asyncio.run(main())
    assert isinstance(model.generate("a", max_tokens=3), str)


def test_open_without_serving_says_what_to_do(folder):
    with pytest.raises(RuntimeError, match="async with model.serving"):
        asyncio.run(composer_jax.load_hf(folder, dtype="float32").open(0))


def test_a_model_plays_an_episode(model):
    """Random weights write no call; the transcript is what they sampled."""
    settings = EpisodeSettings(EpisodeLimits(max_turn_tokens=12), system_prompt="Be brief.")
    episode = composer_jax.run_attempt(TASK, model, seed=4, settings=settings)
    assert episode.outcome == "no_call" and episode.reward == 0.0 and episode.seed == 4
    prompt, answer = episode.transcript.nodes
    assert prompt.tokens.tolist() == model.chat_format.render(
        [Message("system", "Be brief."), Message("user", TASK.instruction)]
    )
    assert 0 < len(answer.sampled_tokens) <= 12
    again = composer_jax.run_attempt(TASK, model, seed=4, settings=settings)
    assert again.transcript.nodes[1].tokens.tolist() == answer.tokens.tolist()


def test_any_policy_plays_an_episode_with_the_format_it_is_given(model):
    calls = [ToolCall("edit", {"path": "price.py", "old": "a + b", "new": "a - b"}), ToolCall("finish", {})]
    policy = ScriptedPolicy(lambda seed: [model.chat_format.render_assistant("", [call]) for call in calls])
    assert composer_jax.run_attempt(TASK, policy, chat=model.chat_format).reward == 1.0
    with pytest.raises(UserError, match="ScriptedPolicy has no chat format of its own"):
        composer_jax.run_attempt(TASK, policy)


def test_the_episodes_of_a_group_are_those_of_their_seeds(model):
    settings = EpisodeSettings(EpisodeLimits(max_turn_tokens=12))
    group = composer_jax.run_group(TASK, model, (4, 7, 5), settings=settings)
    assert [episode.seed for episode in group] == [4, 7, 5]
    for episode in group:
        alone = composer_jax.run_attempt(TASK, model, seed=episode.seed, settings=settings)
        assert alone.transcript.tokens == episode.transcript.tokens


def test_what_a_policy_raises_ends_a_group(model):
    def script(seed):
        raise ConnectionError(f"no messages for seed {seed}")

    with pytest.raises(ConnectionError, match="no messages for seed 3"):
        composer_jax.run_group(TASK, ScriptedPolicy(script), (3, 3), chat=model.chat_format)


def test_a_model_generates_without_dropping_tokens(folder):
    """A dispatch that may drop pairs, which the sampler does not count, is replaced by the ring."""
    loaded = composer_jax.load_hf(folder, dtype="float32")
    for name, used in (("ragged_all_to_all", "ring"), ("dense", "dense")):
        loaded._sampler = None
        loaded.definition = ModelDef(dataclasses.replace(CONFIG, dispatch=name, compute_dtype="float32"))
        assert loaded.generate([7, 9], max_tokens=3, temperature=0, stop=())
        assert loaded._sampler.definition.config.dispatch == used


def test_sampler_sizes_can_be_chosen(folder):
    loaded = composer_jax.load_hf(folder, dtype="float32")
    loaded.sampler_config = SamplerConfig(slots=3, max_model_len=48, prefill_shapes=((3, 16),))

    async def main():
        async with loaded.serving():
            sessions = [await loaded.open(seed) for seed in range(3)]
            samples = await asyncio.gather(*(s.sample([7, 9], SamplingParams(3, temperature=0)) for s in sessions))
            return [sample.tokens for sample in samples]

    assert asyncio.run(main()) == [greedy_tokens([7, 9], 3, loaded.text.end_tokens)] * 3
